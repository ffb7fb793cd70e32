"""Tests the order of waiting sequences against an oracle that keeps every sequence in one plain list."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.requests import make_request
from tokasaurus.manager.state.fair_queue import MOST_DROPPED, QUANTUM, FairQueue
from tokasaurus.manager.state.sequence import Phase, Sequence, make_prompt
from tokasaurus.manager.state.sequence_queues import SequenceQueues
from tokasaurus.manager.state.slot_arrays import SlotArrays


def make_sequence(number: int, client: str = "", priority: int = 0, is_background: bool = False) -> Sequence:
    request = replace(make_request(number, 1), client=client, priority=priority, is_background=is_background)
    return Sequence(request, 0, make_prompt(request.prompt_ids), b"", None)


class SlowClass:
    """The live or the background sequences."""

    def __init__(self) -> None:
        self.preempted: list[Sequence] = []
        self.clients: list[str] = []
        """The clients with sequences in `waiting`; the first has the turn."""
        self.num_taken = 0
        """Sequences taken in this turn."""
        self.waiting: list[Sequence] = []
        """In order of arrival."""

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        if sequence.request.client not in self.clients:
            self.clients.append(sequence.request.client)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        self.waiting.remove(sequence)
        if all(other.request.client != sequence.request.client for other in self.waiting):
            if self.clients[0] == sequence.request.client:
                self.num_taken = 0
            self.clients.remove(sequence.request.client)

    def take(self) -> Sequence:
        if self.preempted:
            return self.preempted.pop(0)
        client = self.clients[0]
        of_client = [sequence for sequence in self.waiting if sequence.request.client == client]
        sequence = min(of_client, key=lambda sequence: sequence.request.priority)  # the first of equals
        self.num_taken += 1
        self.remove(sequence)
        if client in self.clients and self.num_taken == QUANTUM:
            self.clients.append(self.clients.pop(0))
            self.num_taken = 0
        return sequence

    def copy(self) -> "SlowClass":
        other = SlowClass()
        other.preempted, other.clients, other.waiting = [*self.preempted], [*self.clients], [*self.waiting]
        other.num_taken = self.num_taken
        return other


class SlowQueue:
    def __init__(self) -> None:
        self.classes = {False: SlowClass(), True: SlowClass()}

    def class_of(self, sequence: Sequence) -> SlowClass:
        return self.classes[sequence.request.is_background]

    def all(self) -> list[Sequence]:
        return [sequence for one in self.classes.values() for sequence in [*one.preempted, *one.waiting]]

    def take(self) -> Sequence:
        live, background = self.classes.values()
        return (live if live.preempted or live.waiting else background).take()

    def in_order(self) -> list[Sequence]:
        copy = SlowQueue()
        copy.classes = {is_background: one.copy() for is_background, one in self.classes.items()}
        return [copy.take() for _ in self.all()]


operation_strategy = st.tuples(
    st.sampled_from(["add", "add", "add preempted", "block", "unblock", "drop", "drop many", "take", "take", "look"]),
    st.sampled_from(["a", "a", "a", "b", "c"]),
    st.sampled_from([0, 0, 0, -5, 7]),
    st.sampled_from([False, False, True]),
    st.integers(0, 40),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(operation_strategy, max_size=60))
def test_sequences_are_seen_and_taken_in_the_order_of_the_oracle(operations) -> None:
    """Clients, priorities, cancellation, preemption, grammars and the background class, all together."""
    queues, slow, number = SequenceQueues(SlotArrays(4, 4)), SlowQueue(), 0
    blocked: list[Sequence] = []
    for name, client, priority, is_background, count in operations:
        waiting = slow.all()
        if name in ("add", "add preempted", "block"):
            for _ in range(count if name == "add" else 1):
                number += 1
                sequence = make_sequence(number, client, priority, is_background)
                if name == "add":
                    queues.add_waiting(sequence)
                    slow.class_of(sequence).add(sequence)
                elif name == "block":
                    queues.block(sequence)
                    blocked.append(sequence)
                else:
                    queues.add_waiting(sequence, first=True)
                    slow.class_of(sequence).preempted.insert(0, sequence)
        elif name == "unblock" and blocked:
            sequence = blocked.pop(count % len(blocked))
            queues.unblock(sequence)
            slow.class_of(sequence).add(sequence)
        elif name == "drop" and blocked:
            queues.drop_waiting(blocked.pop(count % len(blocked)))
        elif name in ("drop", "drop many"):
            first = count % len(waiting) if waiting else 0
            for sequence in waiting[first : first + 1 if name == "drop" else None]:
                queues.drop_waiting(sequence)
                assert sequence.phase is Phase.FINISHED
                slow.class_of(sequence).remove(sequence)
        elif name == "take":
            for _ in range(min(count, len(waiting))):
                assert queues.take_first_waiting() is slow.take()
        elif name == "look":
            assert queues.first_waiting(count) == slow.in_order()[:count]
        assert queues.num_waiting == len(slow.all()) + len(blocked)
    seen = queues.first_waiting(10**6)
    assert seen == slow.in_order()
    assert [queues.take_first_waiting() for _ in seen] == seen
    assert queues.first_waiting(1) == []


def test_clients_take_turns_and_a_new_client_waits_for_one_turn_of_each() -> None:
    queue = FairQueue()
    for number in range(1000):
        queue.add(make_sequence(number, "a" if number % 2 else "b"))
    for _ in range(5):
        queue.take()
    queue.add(make_sequence(1000, "c"))
    clients = [queue.take().request.client for _ in range(60)]
    assert clients == ["b"] * (QUANTUM - 5) + ["a"] * QUANTUM + ["c"] + ["b"] * QUANTUM + ["a"] * QUANTUM


@pytest.mark.parametrize("num_kept", [0, 1, 100])
def test_few_cancelled_sequences_stay_in_memory(num_kept: int) -> None:
    """Cancelled from the back, where the queue cannot drop them one by one."""
    queue = FairQueue()
    sequences = [make_sequence(number, "a", priority=number % 3) for number in range(2000)]
    for sequence in sequences:
        queue.add(sequence)
    ordered = sorted(sequences, key=lambda sequence: sequence.request.priority)
    for sequence in reversed(ordered[num_kept:]):
        sequence.phase = Phase.FINISHED
        queue.remove(sequence)
    num_held = sum(client._num_held for client in queue._clients.values())
    assert num_held == sum(len(held) for client in queue._clients.values() for held in client._by_priority.values())
    assert num_held <= (2 * num_kept + MOST_DROPPED if num_kept else 0)
    assert list(queue.in_order()) == ordered[:num_kept]
    assert bool(queue) is (num_kept > 0)
