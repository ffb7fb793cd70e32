"""Steps and their results have a form of their own on the way between the manager and the workers."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from tokasaurus.messages.forward import (
    ForwardInput,
    ForwardOutput,
    NonfiniteTokens,
    PrefixGroups,
    PromptLogprobsInput,
    PromptLogprobsOutput,
    SlotChanges,
    SlotOpens,
    StateSaves,
    TableCopies,
    TokenMasks,
    TopOfRows,
    WindowBlocks,
)
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams

NOTHING = np.zeros(0, np.int32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plain(value: Any) -> Any:
    """Arrays with their types, and fields by name."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


OPENED = SlotOpens(
    *(int32(11, 12), int32(13, 14), int32(15, 16), np.array([SamplingParams(0.5), SamplingParams()], SAMPLING_DTYPE)),
    *(np.array([1, 2**64 - 1], np.uint64), np.array([3, 4], np.uint32), np.array([True, False])),
)
FULL = ForwardInput(
    *(1, int32(2, 3), int32(4, 5), 6, int32(7, 8)),
    SlotChanges(
        *(int32(9), OPENED, int32(17), int32(18), TableCopies(int32(19), int32(20), int32(21)), ((31, "32"),)),
        WindowBlocks(int32(33), int32(34)[None]),
    ),
    PrefixGroups(int32(22), int32(23)),
    PromptLogprobsInput(int32(24), int32(25), int32(26), 27),
    TokenMasks(int32(28), np.array([[29]], np.uint32)),
    microbatch=30,
    saves=StateSaves(int32(35), int32(36), int32(37)),
)
PLAIN = ForwardInput(1, int32(2), int32(1), 1, NOTHING, SlotChanges(NOTHING, None, NOTHING, NOTHING))
RESULT = ForwardOutput(
    *(1, int32(2, 3), np.array([0.5, np.inf], np.float32), 4.5, 5, (6.5, 7.5)),
    TopOfRows(np.array([8]), int32(9)[None], np.ones((1, 1), np.float32)),
    PromptLogprobsOutput(np.ones(1, np.float32), int32(10), int32(11)[None], np.zeros((1, 1), np.float32)),
    NonfiniteTokens(int32(12), int32(13)),
    missed_graphs=True,
    idle_seconds=14.5,
    experts=np.ones((15, 1, 1), np.uint8),
    expert_tokens=np.full((1, 1), 16, np.int64),
    vectors=np.full((1, 2), 17, np.float32),
)


@pytest.mark.parametrize("message", [FULL, PLAIN, RESULT, ForwardOutput(1, NOTHING, None, 0.5)])
def test_each_field_arrives(message: ForwardInput | ForwardOutput) -> None:
    assert plain(pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))) == plain(message)


@pytest.mark.parametrize("message", [FULL, RESULT])
def test_each_field_of_these_messages_differs_from_its_default(message: ForwardInput | ForwardOutput) -> None:
    """So that the test above notices one that is left out."""
    for part in (message, FULL.changes):
        for field in dataclasses.fields(part):
            assert getattr(part, field.name) is not field.default, field.name


def test_arrays_may_be_changed() -> None:
    found = pickle.loads(pickle.dumps(FULL))
    found.slots[0] = 99
    assert found.slots.tolist() == [99, 3]
