"""The order in which waiting sequences are admitted: by turns among clients, by priority and age within a client."""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from tokasaurus.manager.state.samples import Samples
from tokasaurus.manager.state.sequence import Phase, Sequence

QUANTUM = 16
"""Sequences of one client in a turn: samples of one prompt stay together, so that they share its prefill."""

SEQUENCES_PER_PRIORITY = 256
"""Worth of one level of priority: a sequence comes before those of its client with the next higher value, unless they
were added at least so many sequences earlier."""

MOST_DROPPED = 64
"""Cancelled sequences that a client's queue may hold however few of its sequences wait."""


class ClientQueue:
    """The waiting sequences of one client: lowest rank first, and first come, first served among equals.

    The rank of an entry is the number of sequences that the client had added before it, plus SEQUENCES_PER_PRIORITY
    times its priority. So a lower priority value comes first, but one level is worth at most so many later sequences:
    under an endless stream of urgent requests, the others come to their turn.

    An entry is a sequence, or the Samples for which sequences are still to be created. A cancelled entry is never at
    the front; elsewhere it stays until too many have been cancelled.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Sequence | Samples]] = deque()
        """(rank, entry) by rank. Includes cancelled entries."""
        self._num_added = 0
        """Sequences added so far."""
        self.num_waiting = 0
        """Sequences, including those to be created."""

    def add(self, entry: Sequence | Samples) -> None:
        rank = self._num_added + SEQUENCES_PER_PRIORITY * entry.request.priority
        if not self._entries or self._entries[-1][0] <= rank:
            self._entries.append((rank, entry))
        else:
            self._entries.insert(bisect_right(self._entries, rank, key=_rank), (rank, entry))
        num_sequences = entry.num_to_create if isinstance(entry, Samples) else 1
        self._num_added += num_sequences
        self.num_waiting += num_sequences

    def count_cancelled(self, num: int) -> None:
        """`num` of its sequences no longer wait."""
        self.num_waiting -= num
        self._drop_cancelled_at_front()
        if len(self._entries) > 2 * self.num_waiting + MOST_DROPPED:
            self._entries = deque(ranked for ranked in self._entries if _waits(ranked[1]))

    def take(self) -> Sequence:
        """Remove and return the first sequence. Precondition: there is one."""
        entry = self._entries[0][1]
        if isinstance(entry, Samples):
            entry = entry.create()
        else:
            self._entries.popleft()
        self.num_waiting -= 1
        self._drop_cancelled_at_front()
        return entry

    def in_order(self) -> Iterator[Sequence]:
        """Its sequences in the order in which `take` would return them, each created when it is reached."""
        entries, index = self._entries, 0
        while index < len(entries):
            rank, entry = entries[index]
            if isinstance(entry, Samples):
                if not entry.num_to_create:
                    index += 1
                    continue
                entry = entry.create()
                entries.insert(index, (rank, entry))
            index += 1
            if entry.phase is Phase.WAITING:
                yield entry

    def _drop_cancelled_at_front(self) -> None:
        while self._entries and not _waits(self._entries[0][1]):
            self._entries.popleft()


def _rank(ranked: tuple[int, Sequence | Samples]) -> int:
    return ranked[0]


def _waits(entry: Sequence | Samples) -> bool:
    return entry.num_to_create > 0 if isinstance(entry, Samples) else entry.phase is Phase.WAITING


class FairQueue:
    """Waiting sequences of many clients: the preempted ones, then `QUANTUM` of each client in turn.

    A client whose last sequence leaves the queue loses its place; it gets the last place when it adds another.
    """

    def __init__(self) -> None:
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        self._clients: OrderedDict[str, ClientQueue] = OrderedDict()
        self._num_left_of_turn = QUANTUM

    def __bool__(self) -> bool:
        return bool(self._preempted or self._clients)

    def add(self, entry: Sequence | Samples) -> None:
        client = entry.request.client
        queue = self._clients.get(client)
        if queue is None:
            queue = self._clients[client] = ClientQueue()
        queue.add(entry)

    def add_preempted(self, sequence: Sequence) -> None:
        """Put `sequence` before all others."""
        self._preempted[sequence] = None
        self._preempted.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a cancelled sequence, whose phase is no longer WAITING. Precondition: it is in the queue."""
        if sequence in self._preempted:
            del self._preempted[sequence]
        else:
            self._count_cancelled(sequence.request.client, 1)

    def remove_samples(self, samples: Samples) -> None:
        """Create no more sequences of a cancelled request. Precondition: some are to be created."""
        num_removed, samples.num_to_create = samples.num_to_create, 0
        self._count_cancelled(samples.request.client, num_removed)

    def _count_cancelled(self, client: str, num: int) -> None:
        queue = self._clients[client]
        queue.count_cancelled(num)
        if not queue.num_waiting:
            self._remove_client(client)

    def take(self) -> Sequence:
        """Remove and return the first sequence. Precondition: there is one."""
        if self._preempted:
            return self._preempted.popitem(last=False)[0]
        client = next(iter(self._clients))
        queue = self._clients[client]
        sequence = queue.take()
        self._num_left_of_turn -= 1
        if not queue.num_waiting:
            self._remove_client(client)
        elif self._num_left_of_turn == 0:
            self._clients.move_to_end(client)
            self._num_left_of_turn = QUANTUM
        return sequence

    def in_order(self) -> Iterator[Sequence]:
        """All sequences in the order in which `take` would return them. The queue must not change meanwhile."""
        yield from self._preempted
        num_left_of_turn = self._num_left_of_turn
        rest = deque((queue.num_waiting, queue.in_order()) for queue in self._clients.values())
        while rest:
            num_waiting, sequences = rest.popleft()
            yield from islice(sequences, num_left_of_turn)
            if num_waiting > num_left_of_turn:
                rest.append((num_waiting - num_left_of_turn, sequences))
            num_left_of_turn = QUANTUM

    def _remove_client(self, client: str) -> None:
        if client == next(iter(self._clients)):
            self._num_left_of_turn = QUANTUM
        del self._clients[client]
