"""Random cases for the Triton kernels of experts, on any device where they run, against float64 and plain torch."""

from collections.abc import Sequence

import torch

from tests.model.decoder.helpers.layer_kernels import with_gaps
from tokasaurus.checkpoint.spec import RouterSpec
from tokasaurus.model.decoder.experts import choose_by_torch
from tokasaurus.model.decoder.triton_experts import choose, multiply_groups, sort_rows

CASES: dict[str, tuple[Sequence[int], int, int, int]] = {
    "one row": ([1], 16, 16, 0),
    "odd sizes, experts without rows": ([5, 0, 17, 0, 1], 100, 130, 3),
    "one has all": ([0, 0, 70, 0], 64, 32, 0),
    "many rows": ([65, 0, 200], 40, 24, 9),
    "no rows": ([0, 0], 16, 16, 4),
}
"""Rows of each expert, inputs, outputs, and rows that no expert has."""


ROUTERS = (
    RouterSpec(60, 4),
    RouterSpec(128, 8, normalizes=True),
    RouterSpec(1, 1),
    RouterSpec(32, 4, "softmax_of_chosen"),
    RouterSpec(16, 1, "sigmoid_of_chosen", scale=2.5),
    RouterSpec(96, 6, "sigmoid", has_choice_bias=True, normalizes=True, min_sum=1e-20, scale=1.5),
)


def check_choice(spec: RouterSpec, device: torch.device) -> None:
    """With many equal scores, infinite ones, and a token of NaN."""
    generator = torch.Generator().manual_seed(spec.num_experts)
    logits = with_gaps((torch.randn(9, spec.num_experts, generator=generator) * 3).to(device))
    logits[1:4].round_()
    logits[4] = 0
    logits[5, ::2] = -0.0
    logits[6, 0] = -torch.inf
    logits[8] = torch.nan
    bias = torch.randn(spec.num_experts, generator=generator).round().to(device) if spec.has_choice_bias else None
    chosen, weights = choose(logits, spec, bias)
    expected, of_expected = choose_by_torch(logits, spec, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, of_expected, equal_nan=True)
    assert choose(logits[:0], spec, bias)[0].shape == (0, spec.num_chosen)


def check_sort(num_rows: int, num_experts: int, device: torch.device) -> None:
    """Some rows have no expert."""
    generator = torch.Generator().manual_seed(num_rows)
    experts = torch.randint(num_experts + 1, (num_rows,), generator=generator)
    order, ends = sort_rows(experts.to(device), num_experts)
    assert order.tolist() == sorted(range(num_rows), key=experts.tolist().__getitem__)
    assert ends.tolist() == experts.bincount(minlength=num_experts + 1)[:-1].cumsum(0).tolist()


def check(
    case: tuple[Sequence[int], int, int, int], dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """tolerance: absolute and relative, of results of about 1."""
    counts, num_inputs, num_outputs, num_others = case
    generator = torch.Generator().manual_seed(num_inputs)
    num_rows = sum(counts) + num_others
    x = with_gaps(torch.randn(num_rows, num_inputs, generator=generator).to(device, dtype))
    weight = torch.randn(len(counts), num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    weight = weight.to(device, dtype)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    out = multiply_groups(x, weight, ends)
    assert out.shape == (num_rows, num_outputs)
    start = 0
    for count, own in zip(counts, weight, strict=True):
        rows = slice(start, start + count)
        expected = x[rows].double() @ own.double().T
        torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)
        start += count
