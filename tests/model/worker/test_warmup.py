"""Warm-up steps reach the limits of a forward and do not exceed them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.installed_triton import needs_interpreter, run_python
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.worker.warmup import (
    ForwardLimits,
    _seconds_per_pair,
    decode_after,
    longest_last_tokens,
    longest_prefill,
    warm_up,
    widest_prefill,
)

LIMITS = [
    ForwardLimits(max_tokens=64, max_seqs=8, context_length=512, vocab_size=VOCAB_SIZE),
    ForwardLimits(max_tokens=60, max_seqs=7, context_length=512, vocab_size=VOCAB_SIZE),
    ForwardLimits(max_tokens=64, max_seqs=8, context_length=4, vocab_size=VOCAB_SIZE),
    ForwardLimits(max_tokens=8, max_seqs=16, context_length=512, vocab_size=VOCAB_SIZE),
    ForwardLimits(max_tokens=1000, max_seqs=1, context_length=512, vocab_size=VOCAB_SIZE),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_the_widest_steps_have_as_many_rows_and_tokens_as_fit(limits: ForwardLimits) -> None:
    step = widest_prefill(limits)
    num_rows = min(limits.max_seqs, limits.max_tokens)
    assert len(step.slots) == len(set(step.slots.tolist())) == num_rows
    assert 0 not in step.slots, "slot 0 is for padding"
    assert step.num_tokens.sum() == min(limits.max_tokens, num_rows * limits.context_length)
    assert step.num_tokens.max() <= limits.context_length
    decode = decode_after(step)
    assert decode.num_decode == num_rows
    assert decode.num_tokens.tolist() == [1] * num_rows


@pytest.mark.parametrize("limits", LIMITS)
def test_the_longest_steps_end_where_the_context_ends(limits: ForwardLimits) -> None:
    for step in (longest_prefill(limits), longest_last_tokens(limits)):
        opened = step.changes.opened
        assert opened is not None
        assert (opened.first_positions + step.num_tokens).tolist() == [limits.context_length] * len(step.slots)
        assert step.num_tokens.sum() <= limits.max_tokens
        assert len(step.slots) <= limits.max_seqs
    assert longest_prefill(limits).num_tokens[0] == min(limits.max_tokens, limits.context_length)


class TimedRunner:
    """Moves a clock by the time that a device of this law takes."""

    device = torch.device("cpu")

    def __init__(self, per_token: float, per_pair: float) -> None:
        self.per_token, self.per_pair, self.now_s = per_token, per_pair, 0.0
        self.steps: list[ForwardInput] = []

    def run(self, step: ForwardInput) -> None:
        self.steps.append(step)
        contexts = step.changes.opened.first_positions + step.num_tokens
        self.now_s += float(step.num_tokens.sum()) * self.per_token + float(step.num_tokens @ contexts) * self.per_pair


@pytest.mark.parametrize(
    "limits", [*LIMITS, replace(LIMITS[0], context_length=100_000), replace(LIMITS[0], context_length=2)]
)
@pytest.mark.parametrize("per_pair", [0.0, 1e-9, 1e-6])
def test_the_cost_of_context_is_told_from_that_of_tokens(
    limits: ForwardLimits, per_pair: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TimedRunner(1e-4, per_pair)
    monkeypatch.setattr(time, "perf_counter", lambda: runner.now_s)
    assert _seconds_per_pair(runner, limits) == pytest.approx(per_pair, abs=1e-12)
    for step in runner.steps:
        assert int(step.num_tokens.sum()) <= limits.max_tokens
        assert (step.changes.opened.num_prompt_tokens <= limits.context_length).all()


@pytest.mark.parametrize("limits", LIMITS)
def test_a_runner_runs_every_warm_up_step(limits: ForwardLimits, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, "torch", num_blocks=1, num_slots=limits.max_seqs)
    warm_up(runner, limits, 16, is_context_costly=True)


@pytest.mark.long
@needs_interpreter
def test_no_step_needs_a_variant_of_a_kernel_that_the_warm_up_did_not_compile() -> None:
    printed = run_python("-W", "ignore", "-m", "tests.model.worker.helpers.kernel_variants")
    assert printed == "done\n", "variants of Triton's kernels that only later steps launch"
