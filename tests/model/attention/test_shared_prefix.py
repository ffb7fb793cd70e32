"""Merging two parts, by torch and by the kernel, against float64 attention over random scores and values."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokasaurus.model.attention.shared_prefix import merge_partial
from tokasaurus.model.cpu.bindings import load_kernels

Part = tuple[Tensor, Tensor]
Merge = Callable[[Part, Part, torch.dtype], Tensor]


def merge_by(name: str) -> Merge:
    """Into the middle of a larger tensor."""
    kernels = load_kernels()
    assert kernels is not None
    merge = merge_partial if name == "torch" else kernels.merge

    def call(first: Part, second: Part, dtype: torch.dtype) -> Tensor:
        num_rows, *sizes = first[0].shape
        whole = torch.full((num_rows + 2, *sizes), 7.0, dtype=dtype)
        merged = merge(first, second, whole[1 : num_rows + 1])
        assert merged.data_ptr() == whole[1:].data_ptr() or not num_rows
        assert (whole[[0, -1]] == 7).all()
        return merged

    return call


def attend(scores: Tensor, values: Tensor) -> Part:
    """scores [R, H, L], values [L, D] in float64 -> one part, float32."""
    return (scores.softmax(dim=-1) @ values).float(), scores.logsumexp(dim=-1).float()


@pytest.mark.parametrize("name", ["torch", "kernel"])
@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.sampled_from([0, 1, 7, 300]),
    head_dim=st.sampled_from([16, 80]),
    offsets=st.tuples(*(st.sampled_from([-1e4, -30.0, 0.0, 60.0, 1e4]),) * 2),
    seed=st.integers(0, 99),
)
def test_merged_parts_equal_attention_over_both(
    name: str, num_rows: int, head_dim: int, offsets: tuple[float, float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(num_rows, 3, 20, dtype=torch.float64, generator=generator) + offset for offset in offsets]
    values = [torch.randn(20, head_dim, dtype=torch.float64, generator=generator) for _ in range(2)]
    first, second = (attend(*part) for part in zip(scores, values, strict=True))
    expected, _ = attend(torch.cat(scores, dim=-1), torch.cat(values))
    merged = merge_by(name)(first, second, torch.float32)
    # At an lse of 1e4, float32 keeps three decimals.
    atol = 2e-6 * max(1.0, *map(abs, offsets))
    torch.testing.assert_close(merged, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["torch", "kernel"])
def test_a_part_that_a_row_does_not_see_adds_nothing(name: str) -> None:
    output = torch.randn(2, 3, 16)
    seen, unseen = torch.randn(2, 3), torch.full((2, 3), -torch.inf)
    merge = merge_by(name)
    unused = torch.full_like(output, 7.0)
    torch.testing.assert_close(merge((output, seen), (unused, unseen), torch.float32), output, atol=0, rtol=0)
    torch.testing.assert_close(merge((unused, unseen), (output, seen), torch.float32), output, atol=0, rtol=0)
    nothing = merge((unused, unseen), (output, unseen), torch.float32)
    torch.testing.assert_close(nothing, torch.zeros_like(output), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["torch", "kernel"])
def test_only_the_result_is_rounded(name: str) -> None:
    parts = [(torch.randn(50, 3, 32), torch.randn(50, 3)) for _ in range(2)]
    merge = merge_by(name)
    exact = merge(parts[0], parts[1], torch.float32)
    rounded = merge(parts[0], parts[1], torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16(), atol=0, rtol=0)
