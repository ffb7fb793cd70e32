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
from tokasaurus.model.sampling.sample import SamplingRows, sample, sample_by_triton

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
