"""Warm-up steps reach the limits of a forward and do not exceed them."""

from pathlib import Path

import pytest

from tests.helpers.installed_triton import needs_interpreter, run_python
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner
from tokasaurus.model.worker.warmup import (
    ForwardLimits,
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
