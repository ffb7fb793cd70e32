"""The Triton sampler on a CUDA device, at the size of Llama 3's vocabulary, against the C++ kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import make_rows, noise_keys, top_rows, with_params
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.sampling.finish import finish_by_torch
from tokasaurus.model.sampling.sample import SamplingRows, draw_and_finish, sample, sample_by_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
NUM_ROWS, VOCAB_SIZE = 1024, 128_256


def make_case(is_limited: bool) -> tuple[torch.Tensor, SamplingRows]:
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = make_rows(
        [0.0, 0.6, 1.0, 1.5] * (NUM_ROWS // 4),
        [0.9 if is_limited else 1.0] * NUM_ROWS,
        noise_keys(list(range(NUM_ROWS)), [0] * NUM_ROWS, [7] * NUM_ROWS),
    )
    if is_limited:
        top_k = np.array([0, 40] * (NUM_ROWS // 2))
        rows = with_params(rows, top_k=top_k, min_p=np.array([0.0, 0.0, 0.01, 0.0] * (NUM_ROWS // 4)))
    return logits, rows


def moved(value: Any) -> Any:
    """A tensor, dataclass or tuple with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):
        return tuple(moved(part) for part in value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: moved(getattr(value, name)) for name in names})
    return value


def milliseconds(work: Callable[[], object]) -> float:
    """The shortest of ten runs, after three others."""
    times = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[3:])


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_equal_those_of_the_kernels(
    is_limited: bool, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    logits, rows = make_case(is_limited)
    logits = logits.to(dtype)
    expected = sample(logits, rows, load_kernels())
    device_logits, device_rows = logits.cuda(), moved(rows)
    drawn = sample_by_triton(device_logits, device_rows)
    equal = drawn.tokens.cpu() == expected.tokens
    assert equal.float().mean() >= 0.999
    assert drawn.logprobs is not None
    assert expected.logprobs is not None
    torch.testing.assert_close(drawn.logprobs.cpu()[equal], expected.logprobs[equal], atol=1e-4, rtol=1e-5)
    shortest = milliseconds(lambda: sample_by_triton(device_logits, device_rows))
    with capsys.disabled():
        kind = "with limits" if is_limited else "without limits"
        print(f"\nsampler, {NUM_ROWS} x {VOCAB_SIZE}, {dtype}, {kind}: {shortest:.3f} ms")


def test_draws_with_penalties_and_biases_equal_those_of_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """In every row, so that several calls share the memory for changed logits; every other row has top logprobs."""
    logits, rows = make_case(is_limited=False)
    rng = np.random.default_rng(0)
    slots = range(1, NUM_ROWS + 1)
    contexts = Contexts({slot: rng.integers(0, VOCAB_SIZE, 8).tolist() for slot in slots}, NUM_ROWS + 1)
    bias = ((5, 9.0, ALWAYS), (77, -np.inf, ALWAYS))
    contexts.open(list(slots), {slot: Rule(4, 0.5, 0.25, 1.3, bias) for slot in slots})
    rows = dataclasses.replace(contexts.with_rules(rows, list(slots)), top=top_rows(range(0, NUM_ROWS, 2), 20))
    expected = sample(logits, rows, load_kernels())
    device_logits, device_rows = logits.cuda(), moved(rows)
    drawn = sample_by_triton(device_logits, device_rows)
    assert (drawn.tokens.cpu() == expected.tokens).float().mean() >= 0.999
    assert drawn.top_ids is not None
    assert expected.top_ids is not None
    assert drawn.top_logprobs is not None
    assert expected.top_logprobs is not None
    assert torch.equal(drawn.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(drawn.top_logprobs.cpu(), expected.top_logprobs, atol=1e-4, rtol=1e-5)
    shortest = milliseconds(lambda: sample_by_triton(device_logits, device_rows))
    with capsys.disabled():
        print(f"\nsampler, {NUM_ROWS} x {VOCAB_SIZE}, penalties, biases and top logprobs: {shortest:.3f} ms")


@pytest.mark.parametrize("num_rows", [1, 16, 128, 200])
def test_few_rows_are_drawn_in_parts_and_finished(num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A row with NaN among its logits, and one in its hidden state."""
    logits, rows = make_case(is_limited=False)
    logits, rows = logits[:num_rows].bfloat16(), rows.cut(0, num_rows)
    hidden = torch.randn(num_rows, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    if num_rows > 1:
        logits[3, 100_000], hidden[5, 4095] = torch.nan, torch.nan
    slots, last_tokens = torch.arange(num_rows, 0, -1), torch.full((num_rows + 1,), -7)
    sampled = sample(logits, rows, load_kernels())
    expected_last, device_last = last_tokens.clone(), last_tokens.cuda()
    expected = finish_by_torch(sampled.tokens, sampled.logprobs, hidden, slots, expected_last)
    on_device = moved((logits, rows.device_params, rows.noise_keys, hidden, slots))
    finished = draw_and_finish(*on_device, device_last)
    equal = finished.tokens.cpu() == expected.tokens
    assert equal.sum() >= num_rows - 1, "but for a near tie"
    packed = finished.packed.cpu()[equal]
    assert torch.equal(packed[:, ::2], expected.packed[equal][:, ::2])
    is_good = expected.tokens[equal] >= 0
    logprobs, expected_logprobs = (one[is_good, 1].view(torch.float32) for one in (packed, expected.packed[equal]))
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-4, rtol=1e-5)
    assert torch.equal(device_last.cpu()[slots[equal]], expected_last[slots[equal]])
    shortest = milliseconds(lambda: draw_and_finish(*on_device, device_last))
    with capsys.disabled():
        print(f"\nsampler, {num_rows} x {VOCAB_SIZE}, torch.bfloat16, drawn and finished: {shortest:.3f} ms")
