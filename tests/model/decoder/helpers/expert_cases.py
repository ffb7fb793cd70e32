"""Random cases for the Triton kernel of experts, on any device where it runs, against float64."""

from collections.abc import Sequence

import torch

from tests.model.decoder.helpers.layer_kernels import with_gaps
from tokasaurus.model.decoder.triton_experts import multiply_groups

CASES: dict[str, tuple[Sequence[int], int, int, int]] = {
    "one row": ([1], 16, 16, 0),
    "odd sizes, experts without rows": ([5, 0, 17, 0, 1], 100, 130, 3),
    "one has all": ([0, 0, 70, 0], 64, 32, 0),
    "many rows": ([65, 0, 200], 40, 24, 9),
    "no rows": ([0, 0], 16, 16, 4),
}
"""Rows of each expert, inputs, outputs, and rows that no expert has."""


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
