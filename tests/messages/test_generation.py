"""Deltas have a form of their own on the way to the server."""

import dataclasses
import pickle

import numpy as np

from tokasaurus.messages.generation import PromptLogprobs, SequenceDelta, TopLogprobs


def test_each_field_of_a_delta_arrives() -> None:
    delta = SequenceDelta("r", 1, [2, 3], [-0.5, -1.5], "stop", 4, 5, 6, 7, error="wrong", error_code="numerical_error")
    assert pickle.loads(pickle.dumps(delta)) == delta


def test_arrays_of_a_delta_arrive() -> None:
    top = TopLogprobs(np.array([[1, 2]], np.int32), np.array([[-1.0, -2.0]], np.float32))
    prompt = PromptLogprobs(np.zeros(3, np.float32), np.ones(3, np.int32), top)
    delta = SequenceDelta("r", 0, [2], [-0.5], None, 0, 0, 0, 0, top, prompt)
    found = pickle.loads(pickle.dumps(delta))
    assert dataclasses.astuple(found)[:9] == dataclasses.astuple(delta)[:9]
    assert found.top.token_ids.tolist() == top.token_ids.tolist()
    assert found.prompt_logprobs.ranks.tolist() == [1, 1, 1]
    assert found.prompt_logprobs.top.logprobs.tolist() == top.logprobs.tolist()
