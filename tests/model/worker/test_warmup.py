"""Warm-up steps keep the limits of a forward and reach them; every step of the scheduler has a class that they had."""

import dataclasses
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.installed_triton import needs_interpreter, run_python
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner
from tokasaurus.manager.planning import prefix_groups
from tokasaurus.manager.state.engine_state import HydragenOptions
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.model.sampling.rules import has_limits
from tokasaurus.model.worker.warmup import (
    ForwardLimits,
    _seconds_per_pair,
    decode_after,
    longest_last_tokens,
    longest_prefill,
    small_forwards,
    steps_of_all_classes,
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


@pytest.mark.parametrize("limits", LIMITS)
def test_a_small_forward_wants_top_logprobs_and_nothing_else(limits: ForwardLimits) -> None:
    """With rules, masks or limits, tensor-parallel ranks do not search their shards of the vocabulary."""
    assert any(
        opened.want_logprobs.all()
        for step in small_forwards(limits, 16)
        if (opened := step.changes.opened) is not None
        and opened.num_top_logprobs is not None
        and opened.rules is None
        and step.masks is None
        and not has_limits(opened.sampling).any()
    )


@pytest.mark.long
@needs_interpreter
def test_no_step_needs_a_variant_of_a_kernel_that_the_warm_up_did_not_compile() -> None:
    printed = run_python("-W", "ignore", "-m", "tests.model.worker.helpers.kernel_variants")
    assert printed == "done\n", "variants of Triton's kernels that only later steps launch"


NUM_STEPS = 10_000 if IS_NIGHTLY else 2000
MANY = 3


class ShapeClass(NamedTuple):
    """What steps of one class have in common."""

    num_tokens: int
    """1, 2, or 3 for more."""
    num_decode: int
    """0, 1, 2, or 3 for more."""
    has_prefill: bool
    num_sampled: int
    """0, 1, 2, or 3 for more."""
    is_grouped: bool
    """Some decode rows are in a prefix group."""


def shape_class(step: ForwardInput, num_sampled: int) -> ShapeClass:
    """num_sampled: rows that sample; prefill rows do at the ends of their prompts."""
    return ShapeClass(
        min(int(step.num_tokens.sum()), MANY),
        min(step.num_decode, MANY),
        step.num_decode < len(step.slots),
        min(num_sampled, MANY),
        step.groups is not None,
    )


def warmed_up(directory: Path, max_tokens: int = 8192, max_seqs: int = 64) -> list[ShapeClass]:
    """Runs the steps of the warm-up. Returns the shape class of each."""
    save_tiny_model(directory, "llama")
    model, info = load(directory)
    runner = make_runner(model, info, "torch")
    classes = []
    for step in steps_of_all_classes(max_tokens, max_seqs, info.context_length, page_size=16):
        assert step.num_tokens.sum() <= max_tokens
        assert len(step.slots) <= max_seqs
        classes.append(shape_class(step, len(runner.run(step).output().token_ids)))
    return classes


def test_thousands_of_random_steps_of_the_scheduler_have_no_other_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 40 tokens, some shared; 1 to 8 samples; cancelled requests; preemption in a small KV cache;
    trials of prefix groups."""
    monkeypatch.setattr(prefix_groups, "FIRST_INTERVAL", 4)
    known = set(warmed_up(tmp_path))
    found: dict[ShapeClass, int] = {}
    rng = random.Random(0)
    num_steps, number = 0, 0
    while num_steps < NUM_STEPS:
        few_tokens, few_rows = rng.choice([(1, 1), (2, 2), (16, 4), (64, 16)])
        options = make_options(
            rng.choice([40, 200]),
            max_tokens_per_forward=few_tokens,
            max_seqs_per_forward=few_rows,
            hydragen=rng.choice([None, HydragenOptions(1, 1), HydragenOptions(2, 1, is_tried=True)]),
        )
        driver = EngineDriver(options, forecast=rng.choice([None, EndsNext()]), rng=rng)
        unanswered, seen = [], -1
        for _ in range(rng.randint(50, 300)):
            messages = []
            if rng.random() < rng.choice([0.02, 0.2]):
                number += 1
                seed = number if rng.random() < 0.5 else number // 8  # the same seed makes the same prompt
                num_prompt_tokens, num_sequences = rng.choice([1, 2, 3, 12, 40]), rng.choice([1, 1, 2, 8])
                request = make_request(seed, num_prompt_tokens, num_sequences, rng.randint(1, 12))
                messages.append(dataclasses.replace(request, request_id=f"r{number}"))
                unanswered.append(f"r{number}")
            if unanswered and rng.random() < 0.05:
                messages.append(CancelRequest(unanswered.pop(rng.randrange(len(unanswered)))))
            driver.step(messages, rng.randint(0, 2))
            for step, sent in zip(driver.queue, driver.state.steps_in_flight, strict=True):
                if step.step_id > seen:
                    seen = step.step_id
                    shape = shape_class(step, len(sent.sampled))
                    found[shape] = found.get(shape, 0) + 1
                    num_steps += 1
    assert set(found) <= known, set(found) - known
    assert len(found) > 0.8 * len(known), known - set(found)


def test_steps_keep_the_limits_of_a_small_server(tmp_path: Path) -> None:
    assert warmed_up(tmp_path, max_tokens=1, max_seqs=1)
    assert {shape.num_tokens for shape in warmed_up(tmp_path, max_tokens=2, max_seqs=8)} == {1, 2}
