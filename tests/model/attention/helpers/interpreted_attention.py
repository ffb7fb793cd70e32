"""Runs the Triton kernels of attention in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from tests.helpers.examples import IS_NIGHTLY
from tests.model.attention.helpers.kernel_checks import (
    check_lists,
    check_merge,
    check_sinks,
    check_write,
    unfilled_lists,
)
from tests.model.helpers.paged_problems import CPU, Segment, attend_all, fill, make_part
from tokasaurus.model.attention import block_lists, torch_backend, triton_kernels
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attend_rows


def prefix_attention(name: str) -> torch.Tensor:
    """Three rows that share two blocks, and see 1 to 19 tokens after these."""
    shape = KVShape(1, 6, 3, 16, 16, torch.float32, CPU)
    backend = make_backend(name, shape, None)
    backend.allocate(9)
    tables = [[4, 2, 7], [4, 2, 1, 8], [4, 2, 5]]
    fill(backend, shape, [Segment(1, 33), Segment(1, 51), Segment(1, 48)], tables)
    rest = make_part([Segment(1, 1), Segment(1, 19), Segment(1, 16)], [x[2:] for x in tables], 0, True, is_partial=True)
    prefix = make_part([Segment(3, 32)], [[4, 2]], 0, False, is_partial=True)
    layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (rest,), prefix)
    backend.plan(layout)
    query = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    return attend_rows(backend, query, 0, layout)


def check_who_uses_them() -> None:
    """The torch backend and the builder of block lists, told that they have a device for Triton."""
    called: list[str] = []

    def noted(name: str) -> Any:
        kernel: Callable[..., Any] = getattr(triton_kernels, name)

        def call(*arguments: Any) -> Any:
            called.append(name)
            return kernel(*arguments)

        return patch.object(triton_kernels, name, call)

    shape = KVShape(2, 6, 2, 16, 16, torch.float32, CPU)
    segments = [Segment(3, 40), Segment(1, 33)]
    expected, expected_lse = attend_all("reference", shape, segments, causal=True, layer=1, seed=3)
    with (
        patch.object(torch_backend, "uses_triton", lambda *_: True),
        patch.object(block_lists, "uses_triton", lambda *_: True),
        noted("write_kv"),
        noted("merge_partial"),
        noted("fill_lists"),
    ):
        output, lse = attend_all("torch", shape, segments, causal=True, layer=1, seed=3)
        assert set(called) == {"write_kv"}
        torch.testing.assert_close((output, lse), (expected, expected_lse), atol=1e-5, rtol=1e-5)
        merged = prefix_attention("torch")
        assert set(called) == {"write_kv", "merge_partial"}
        lists = unfilled_lists(torch.tensor([0, 2]), torch.tensor([17], dtype=torch.int32), CPU)
        block_lists.fill_lists(torch.tensor([[7, 8, 9]], dtype=torch.int32), torch.tensor([1]), 16, lists)
        assert called[-1] == "fill_lists"
        assert lists.blocks.tolist() == [8, 9]
    torch.testing.assert_close(merged, prefix_attention("reference"), atol=1e-5, rtol=1e-5)


def main() -> None:
    # The interpreter truncates float32 to bfloat16, where a GPU rounds.
    for seed, (size, dtype, cache_dtype) in enumerate(
        [
            ((0, 2, 16), torch.float32, torch.float32),
            ((1, 1, 64), torch.float32, torch.float32),
            ((40, 3, 80), torch.float32, torch.float32),
            ((25, 8, 128), torch.bfloat16, torch.bfloat16),
            ((13, 9, 128), torch.bfloat16, torch.float16),
            ((31, 5, 48), torch.float32, torch.float16),
        ]
    ):
        check_write(seed, CPU, size, dtype, cache_dtype)
    for seed, size in enumerate([(1, 1, 16), (7, 3, 80), *(((70, 9, 128), (50, 4, 64)) if IS_NIGHTLY else ())]):
        for offset in (0.0, 40.0, -300.0) if IS_NIGHTLY else (-300.0,):
            check_merge(seed, CPU, size, offset)
    for seed, (size, dtype) in enumerate([((1, 1, 16), torch.float32), ((7, 3, 80), torch.bfloat16)]):
        check_sinks(seed, CPU, size, dtype)
    nothing = torch.empty(0, 3, 16), torch.empty(0, 3)
    assert triton_kernels.merge_partial(nothing, nothing, torch.empty(0, 3, 16)).shape == (0, 3, 16)
    triton_kernels.count_sinks(*nothing, torch.zeros(3))
    for num_segments, page_size, max_blocks in (
        (0, 16, 4),
        (1, 16, 4),
        (20, 5, 3),
        *(((30, 1, 9), (50, 16, 40)) if IS_NIGHTLY else ()),
    ):
        check_lists(num_segments, CPU, num_segments, page_size, max_blocks)
    with patch.object(triton_kernels, "LIST_BLOCK", 8):  # several turns of both loops
        check_lists(5, CPU, 45 if IS_NIGHTLY else 9, 16, 40 if IS_NIGHTLY else 20)
    check_who_uses_them()
    print("all equal")


if __name__ == "__main__":
    main()
