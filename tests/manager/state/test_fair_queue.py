"""Tests the order of waiting sequences against an oracle that keeps every sequence in one plain list."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.state import sequence_queues
from tokasaurus.manager.state.sequence import Phase, Samples, Sequence, make_prompt
from tokasaurus.manager.state.sequence_queues import (
    LIVE_PER_BACKGROUND,
    MAX_DROPPED,
    QUANTUM,
    SEQUENCES_PER_PRIORITY,
    FairQueue,
    SequenceQueues,
)
from tokasaurus.manager.state.slot_arrays import SlotArrays
from tokasaurus.messages.generation import GenerateRequest


def make_sequence(number: int, client: str = "", priority: int = 0, is_background: bool = False) -> Sequence:
    request = replace(make_request(number, 1), client=client, priority=priority, is_background=is_background)
    return Sequence(request, 0, make_prompt(request.prompt_ids), b"", None)


@dataclass(eq=False)
class Item:
    """A waiting sequence of the oracle; `sequence` is None while the queue has not created it."""

    request: GenerateRequest
    sequence: Sequence | None = None
    samples: Samples | None = None
    rank: int = 0
    """Sequences that its client had added before, and the worth of its priority in sequences."""


class SlowClass:
    """The live or the background sequences."""

    def __init__(self) -> None:
        self.preempted: list[Item] = []
        self.clients: list[str] = []
        """The clients with sequences in `waiting`; the first has the turn."""
        self.num_taken = 0
        """Sequences taken in this turn."""
        self.waiting: list[Item] = []
        """In order of arrival."""
        self.num_added: dict[str, int] = {}
        """By client, since it last had no sequence in `waiting`."""

    def add(self, *items: Item) -> None:
        """`items` are the samples of one request."""
        client = items[0].request.client
        if client not in self.clients:
            self.clients.append(client)
            self.num_added[client] = 0
        for item in items:
            item.rank = self.num_added[client] + sequence_queues.SEQUENCES_PER_PRIORITY * item.request.priority
        self.waiting += items
        self.num_added[client] += len(items)

    def remove(self, item: Item) -> None:
        if item in self.preempted:
            self.preempted.remove(item)
            return
        self.waiting.remove(item)
        if all(other.request.client != item.request.client for other in self.waiting):
            if self.clients[0] == item.request.client:
                self.num_taken = 0
            self.clients.remove(item.request.client)

    def take(self) -> Item:
        if self.preempted:
            return self.preempted.pop(0)
        client = self.clients[0]
        of_client = [item for item in self.waiting if item.request.client == client]
        item = min(of_client, key=lambda item: item.rank)  # the first of equals
        self.num_taken += 1
        self.remove(item)
        if client in self.clients and self.num_taken == QUANTUM:
            self.clients.append(self.clients.pop(0))
            self.num_taken = 0
        return item

    def copy(self) -> "SlowClass":
        other = SlowClass()
        other.preempted, other.clients, other.waiting = [*self.preempted], [*self.clients], [*self.waiting]
        other.num_taken = self.num_taken
        return other


class SlowQueue:
    def __init__(self) -> None:
        self.classes = {False: SlowClass(), True: SlowClass()}
        self.num_overtaken = 0
        """Live sequences taken in a row while a background one waited."""

    def class_of(self, item: Item) -> SlowClass:
        return self.classes[item.request.is_background]

    def all(self) -> list[Item]:
        return [item for one in self.classes.values() for item in [*one.preempted, *one.waiting]]

    def take(self) -> Item:
        live, background = self.classes.values()
        if not (background.preempted or background.waiting):
            return live.take()
        if not (live.preempted or live.waiting) or self.num_overtaken == sequence_queues.LIVE_PER_BACKGROUND:
            self.num_overtaken = 0
            return background.take()
        self.num_overtaken += 1
        return live.take()

    def in_order(self) -> list[Item]:
        copy = SlowQueue()
        copy.num_overtaken = self.num_overtaken
        copy.classes = {is_background: one.copy() for is_background, one in self.classes.items()}
        return [copy.take() for _ in self.all()]


class Pair:
    """The queues and the oracle, changed together."""

    def __init__(self) -> None:
        self.queues, self.slow = SequenceQueues(SlotArrays(4, 4)), SlowQueue()
        self.blocked: list[Item] = []
        self.num_made = 0

    def new(self, client: str, priority: int, is_background: bool) -> Item:
        self.num_made += 1
        sequence = make_sequence(self.num_made, client, priority, is_background)
        return Item(sequence.request, sequence)

    def add(self, item: Item) -> None:
        assert item.sequence is not None
        self.queues.add_waiting(item.sequence)
        self.slow.class_of(item).add(item)

    def add_preempted(self, item: Item) -> None:
        assert item.sequence is not None
        self.queues.add_waiting(item.sequence, first=True)
        self.slow.class_of(item).preempted.insert(0, item)

    def add_samples(self, num: int, *kind: Any) -> None:
        request = replace(self.new(*kind).request, num_sequences=num)
        items = [Item(request) for _ in range(num)]

        def make(index: int) -> Sequence:
            assert items[index].sequence is None
            items[index].sequence = sequence = Sequence(request, index, make_prompt(request.prompt_ids), b"", None)
            return sequence

        samples = Samples(request, make, num)
        self.queues.add_samples(samples)
        for item in items:
            item.samples = samples
        self.slow.class_of(items[0]).add(*items)

    def block(self, item: Item) -> None:
        assert item.sequence is not None
        self.queues.block(item.sequence)
        self.blocked.append(item)

    def unblock(self, number: int) -> None:
        item = self.blocked.pop(number % len(self.blocked))
        assert item.sequence is not None
        self.queues.unblock(item.sequence)
        self.slow.class_of(item).add(item)

    def cancel(self, item: Item) -> None:
        """All waiting samples of its request."""
        together = [item]
        if item.samples is not None:
            together = [other for other in self.slow.all() if other.samples is item.samples]
            if item.samples.num_to_create:
                self.queues.drop_samples(item.samples)
        for one in together:
            if one.sequence is not None:
                self.queues.drop_waiting(one.sequence)
                assert one.sequence.phase is Phase.FINISHED
            if item in self.blocked:
                self.blocked.remove(one)
            else:
                self.slow.class_of(one).remove(one)

    def take(self) -> None:
        sequence = self.queues.take_first_waiting()
        assert sequence is self.slow.take().sequence
        sequence.phase = Phase.PREFILL

    def look(self, most: int) -> None:
        seen = self.queues.first_waiting(most)
        assert seen == [item.sequence for item in self.slow.in_order()[:most]]


operation_strategy = st.tuples(
    st.sampled_from(
        ["add", "add", "add samples", "preempt", "block", "unblock", "cancel", "cancel many", "take", "take", "look"]
    ),
    st.tuples(
        st.sampled_from(["a", "a", "a", "b", "c"]),
        st.sampled_from([0, 0, 0, -5, 7]),
        st.sampled_from([False, False, True]),
    ),
    st.integers(1, 40),
)


@examples(400)
@given(st.lists(operation_strategy, max_size=60), st.sampled_from([1, 8, 256]), st.sampled_from([1, 5, 64]))
def test_sequences_are_seen_and_taken_in_the_order_of_the_oracle(operations, per_priority, per_background) -> None:
    """Clients, priorities, samples, cancellation, preemption, grammars and the background class, all together."""
    with (
        patch.object(sequence_queues, "SEQUENCES_PER_PRIORITY", per_priority),
        patch.object(sequence_queues, "LIVE_PER_BACKGROUND", per_background),
    ):
        compare_with_oracle(operations)


def compare_with_oracle(operations) -> None:
    pair = Pair()
    for name, kind, count in operations:
        waiting = pair.slow.all()
        if name == "add":
            for _ in range(count):
                pair.add(pair.new(*kind))
        elif name == "add samples":
            pair.add_samples(count, *kind)
        elif name == "preempt":
            pair.add_preempted(pair.new(*kind))
        elif name == "block":
            pair.block(pair.new(*kind))
        elif name == "unblock" and pair.blocked:
            pair.unblock(count)
        elif name == "cancel" and waiting + pair.blocked:
            pair.cancel((waiting + pair.blocked)[count % len(waiting + pair.blocked)])
        elif name == "cancel many":
            for item in waiting[count % 7 :]:
                if item in pair.slow.all():  # not cancelled with an earlier sample of its request
                    pair.cancel(item)
        elif name == "take":
            for _ in range(min(count, len(waiting))):
                pair.take()
        elif name == "look":
            pair.look(count)
        assert pair.queues.num_waiting == len(pair.slow.all()) + len(pair.blocked)
    pair.look(10**6)
    for _ in pair.slow.all():
        pair.take()
    assert pair.queues.first_waiting(1) == []
    assert pair.queues.num_waiting == len(pair.blocked)


def test_samples_are_created_only_as_far_as_they_are_looked_at() -> None:
    pair = Pair()
    for client in "ab":
        pair.add_samples(30_000, client, 0, False)
    assert [sequence.request.client for sequence in pair.queues.first_waiting(3 * QUANTUM)] == [
        client for client in "aba" for _ in range(QUANTUM)
    ]
    assert sum(item.sequence is not None for item in pair.slow.all()) == 3 * QUANTUM
    assert pair.queues.num_waiting == 60_000


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
    ordered = list(queue.in_order())
    for sequence in reversed(ordered[num_kept:]):
        sequence.phase = Phase.FINISHED
        queue.remove(sequence)
    num_held = sum(len(client._entries) for client in queue._clients.values())
    assert num_held <= (2 * num_kept + MAX_DROPPED if num_kept else 0)
    assert list(queue.in_order()) == ordered[:num_kept]
    assert bool(queue) is (num_kept > 0)


@pytest.mark.parametrize(("num_before", "num_levels"), [(0, 1), (0, 3), (10, 2)])
def test_an_endless_stream_of_urgent_sequences_does_not_starve_the_others(num_before: int, num_levels: int) -> None:
    """One urgent sequence arrives for each that is admitted."""
    queue = FairQueue()
    for number in range(num_before):
        queue.add(make_sequence(number, priority=-1))
    waiting = make_sequence(num_before, priority=num_levels - 1)
    queue.add(waiting)
    num_overtaking = 0
    while True:
        queue.add(make_sequence(100 + num_overtaking, priority=-1))
        if queue.take() is waiting:
            break
        num_overtaking += 1
        assert num_overtaking < 10_000
    assert num_overtaking == num_before + num_levels * SEQUENCES_PER_PRIORITY - 1


def test_endless_live_requests_leave_a_share_to_background_requests() -> None:
    queues = SequenceQueues(SlotArrays(4, 4))
    background = [make_sequence(number, is_background=True) for number in range(3)]
    for sequence in background:
        queues.add_waiting(sequence)
    taken: list[Sequence] = []
    while not taken or taken[-1] is not background[-1]:
        queues.add_waiting(make_sequence(10 + len(taken)))
        queues.add_waiting(make_sequence(10_000 + len(taken)))
        taken.append(queues.take_first_waiting())
        assert len(taken) <= 3 * (LIVE_PER_BACKGROUND + 1)
    places = [taken.index(sequence) for sequence in background]
    assert places == [LIVE_PER_BACKGROUND, 2 * LIVE_PER_BACKGROUND + 1, 3 * LIVE_PER_BACKGROUND + 2]
