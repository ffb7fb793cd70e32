"""Tests the size of the messages to the worker."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from tests.manager.helpers.engine_driver import make_options
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine import engine as engine_module
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.state.engine_state import make_state
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import GenerateRequest


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a busy machine would defer admissions, and fewer sequences would run."""
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def bytes_per_row(num_sequences: int, num_prompt_tokens: int, num_steps: int) -> float:
    """Average bytes of a step's pickled message per decoding sequence, over `num_steps` steps, without prompt tokens.

    Completions have about 100 tokens; each sequence that ends is replaced by a new one."""
    options = make_options(
        num_sequences * (num_prompt_tokens // 16 + 10),
        16,
        max_tokens_per_forward=100_000,
        max_seqs_per_forward=num_sequences,
    )
    state = make_state(options)
    messages: list[ForwardInput] = []
    engine = Engine(state, messages.append)

    def new_request(number: int) -> GenerateRequest:
        return make_request(number, num_prompt_tokens, 1, 60 + number % 80, ignore_eos=True)

    num_requests = num_sequences
    requests = [new_request(number) for number in range(num_requests)]
    num_bytes = num_rows = 0
    for step in range(num_steps + 8):
        engine.step(requests, [])
        message = messages.pop(0)
        if step >= 8:
            num_bytes += len(pickle.dumps(message)) - message.prompt_ids.nbytes
            num_rows += message.num_decode
        num_sampled = len(state.steps_in_flight[0].sampled)
        engine.step([], [ForwardOutput(message.step_id, np.ones(num_sampled, np.int32), None, 0.01)])
        requests = [new_request(num_requests + row) for row in range(len(state.deltas))]
        num_requests += len(requests)
        state.deltas = []
    assert num_rows > 0.9 * num_sequences * num_steps
    return num_bytes / num_rows


@pytest.mark.parametrize(("num_sequences", "num_prompt_tokens"), [(256, 8), (256, 4000), (1024, 300)])
def test_a_step_message_has_under_64_bytes_per_sequence_at_any_context_length(num_sequences, num_prompt_tokens):
    assert bytes_per_row(num_sequences, num_prompt_tokens, 100) < 64


def test_a_step_message_does_not_grow_with_the_context():
    """Except for the block table that a sequence begins with: 8 bytes per block, once in about 80 tokens."""
    assert bytes_per_row(300, 2000, 60) < bytes_per_row(300, 20, 60) + 2000 / 16 * 8 / 80
