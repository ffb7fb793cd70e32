"""The ordered queues of waiting and prefilling sequences, and the decoding slots.

Sequences wait in the order of their admission: by turns among clients, by priority and age within a client.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.sequence import Phase, Samples, Sequence
from tokasaurus.manager.state.slot_arrays import SlotArrays

LIVE_PER_BACKGROUND = 64
"""Live sequences admitted for each background one while both wait."""

QUANTUM = 16
"""Sequences of one client in a turn: samples of one prompt stay together, so that they share its prefill."""

SEQUENCES_PER_PRIORITY = 256
"""What one level of priority is worth: a sequence overtakes its client's sequences of the next higher value, except
those added this many sequences earlier."""

MAX_DROPPED = 64
"""Cancelled entries that a client's queue may always hold; with more, it drops all once they outnumber twice those that
wait."""


class SequenceQueues:
    """Which sequences wait, prefill and decode. Draining sequences are in none of the three.

    Waiting sequences are admitted in the order of FairQueue, those of background requests after all others; but one of
    them is admitted after LIVE_PER_BACKGROUND others that were taken while it waited, so that none waits for ever.
    Sequences that wait for their grammar count in `num_waiting`, but have no place in that order yet.

    `prefilling` is an OrderedDict because cancelled sequences leave from the middle, and because taking the first key
    of a plain dict repeatedly skips over all deleted entries each time.
    """

    def __init__(self, slots: SlotArrays) -> None:
        self._slots = slots
        self._live, self._background = FairQueue(), FairQueue()
        self._num_live_taken = 0
        """Live sequences taken since the last background one, while a background one waited."""
        self._blocked: set[Sequence] = set()
        self.num_waiting = 0
        self.prefilling: OrderedDict[Sequence, None] = OrderedDict()
        self._decoding: NDArray[np.int64] = np.empty(0, np.int64)

    def add_waiting(self, sequence: Sequence, first: bool = False) -> None:
        """Queue `sequence`; put it in front of its class, live or background, if `first`, as after a preemption."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        queue = self._queue_of(sequence)
        if first:
            queue.add_preempted(sequence)
        else:
            queue.add(sequence)

    def add_samples(self, samples: Samples) -> None:
        """Queue the sequences that are to be created. Precondition: there are some."""
        self.num_waiting += samples.num_to_create
        self._queue_of(samples).add(samples)

    def block(self, sequence: Sequence) -> None:
        """`sequence` waits, but may not be admitted before `unblock`."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        self._blocked.add(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """Queue a blocked sequence."""
        self._blocked.remove(sequence)
        self._queue_of(sequence).add(sequence)

    def drop_waiting(self, sequence: Sequence) -> None:
        """Remove a cancelled sequence, blocked or not."""
        sequence.phase = Phase.FINISHED
        self.num_waiting -= 1
        if sequence in self._blocked:
            self._blocked.remove(sequence)
        else:
            self._queue_of(sequence).remove(sequence)

    def drop_samples(self, samples: Samples) -> None:
        """Create no more sequences of a cancelled request. Precondition: some are to be created."""
        self.num_waiting -= samples.num_to_create
        self._queue_of(samples).remove_samples(samples)

    def first_waiting(self, max_sequences: int) -> list[Sequence]:
        """Up to `max_sequences` waiting sequences, in admission order. Creates missing ones."""
        return list(islice(self._in_order(), max_sequences))

    def _in_order(self) -> Iterator[Sequence]:
        live, background = self._live.in_order(), self._background.in_order()
        num_live_taken, next_background = self._num_live_taken, next(background, None)
        for sequence in live:
            if next_background is None:
                yield sequence
                continue
            if num_live_taken == LIVE_PER_BACKGROUND:
                yield next_background
                num_live_taken, next_background = 0, next(background, None)
            yield sequence
            num_live_taken += next_background is not None
        if next_background is not None:
            yield next_background
            yield from background

    def take_first_waiting(self) -> Sequence:
        """Remove and return the first waiting sequence. Precondition: there is one that is not blocked."""
        self.num_waiting -= 1
        if not self._background:
            return self._live.take()
        if self._live and self._num_live_taken < LIVE_PER_BACKGROUND:
            self._num_live_taken += 1
            return self._live.take()
        self._num_live_taken = 0
        return self._background.take()

    def num_waiting_by_client(self) -> Counter[str]:
        """`num_waiting`, by client."""
        counts = Counter(sequence.request.client for sequence in self._blocked)
        for queue in (self._live, self._background):
            queue.count_waiting(counts)
        return counts

    def _queue_of(self, entry: Sequence | Samples) -> "FairQueue":
        return self._background if entry.request.is_background else self._live

    def add_decoding(self, slots: NDArray[np.int64]) -> None:
        """`slots` start to decode; they come after the slots that decode already."""
        before = self.decoding()
        self._slots.is_decoding[slots] = True
        self._decoding = np.concatenate((before, slots))

    def decoding(self) -> NDArray[np.int64]:
        """Decoding slots, in the order in which they started to decode. Read-only."""
        stays = self._slots.is_decoding[self._decoding]
        if not stays.all():
            self._decoding = self._decoding[stays]
        return self._decoding


class ClientQueue:
    """The waiting sequences of one client: lowest rank first, and first come, first served among equals.

    The rank of an entry is the number of sequences that the client had added before it, plus SEQUENCES_PER_PRIORITY
    times its priority. So a lower priority value comes first, but one level is worth only that many later sequences:
    under an endless stream of urgent requests, the others still get their turn.

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
        if len(self._entries) > 2 * self.num_waiting + MAX_DROPPED:
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

    def count_waiting(self, counts: Counter[str]) -> None:
        """Add the number of sequences of each client to `counts`."""
        counts.update(sequence.request.client for sequence in self._preempted)
        for client, queue in self._clients.items():
            counts[client] += queue.num_waiting

    def _remove_client(self, client: str) -> None:
        if client == next(iter(self._clients)):
            self._num_left_of_turn = QUANTUM
        del self._clients[client]
