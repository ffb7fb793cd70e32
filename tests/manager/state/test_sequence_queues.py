"""Tests the queues against plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.state.sequence import Phase, Sequence, make_prompt
from tokasaurus.manager.state.sequence_queues import SequenceQueues
from tokasaurus.manager.state.slot_arrays import SlotArrays

NUM_SLOTS = 8

operations_strategy = st.lists(
    st.tuples(
        st.sampled_from(["add", "add first", "drop", "take", "look", "decode", "stop decoding"]), st.integers(0, 9)
    ),
    max_size=40,
)


def make_sequence(number: int) -> Sequence:
    request = make_request(number)
    return Sequence(request, 0, make_prompt(request.prompt_ids), b"", None)


@examples(300)
@given(operations_strategy)
def test_queues_behave_like_plain_lists(operations):
    slots = SlotArrays(NUM_SLOTS, 4)
    queues = SequenceQueues(slots)
    waiting: list[Sequence] = []
    decoding: list[int] = []
    for number, (name, argument) in enumerate(operations):
        if name == "add":
            waiting.append(make_sequence(number))
            queues.add_waiting(waiting[-1])
        elif name == "add first":
            waiting.insert(0, make_sequence(number))
            queues.add_waiting(waiting[0], first=True)
        elif name == "drop" and waiting:
            sequence = waiting.pop(argument % len(waiting))
            queues.drop_waiting(sequence)
            assert sequence.phase is Phase.FINISHED
        elif name == "take" and waiting:
            assert queues.take_first_waiting() is waiting.pop(0)
        elif name == "look":
            assert queues.first_waiting(argument) == waiting[:argument]
        elif name == "decode":
            new = [slot for slot in range(1, NUM_SLOTS + 1) if slot not in decoding][: argument % 3]
            decoding += new
            queues.add_decoding(np.array(new, np.int64))
        elif name == "stop decoding" and decoding:
            slots.is_decoding[decoding.pop(argument % len(decoding))] = False
        assert queues.num_waiting == len(waiting)
        assert all(sequence.phase is Phase.WAITING for sequence in waiting)
    assert queues.first_waiting(100) == waiting
    assert queues.decoding().tolist() == decoding
    assert slots.is_decoding.nonzero()[0].tolist() == sorted(decoding)
