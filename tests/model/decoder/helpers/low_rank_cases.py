"""Random cases for the Triton kernels of adapters, on any device where they run, against float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.model.decoder.helpers.layer_kernels import with_gaps
from tokasaurus.model.cpu.low_rank import LowRankRows
from tokasaurus.model.decoder.row_adapters import LowRankSlots, TiledRows
from tokasaurus.model.staging.staging import DirectStaging

# T rows


@dataclass(frozen=True, slots=True)
class LowRankCase:
    """A linear layer, fused of parts, with an adapter for each number from 1 on."""

    num_rows: int
    num_inputs: int
    outputs: Sequence[int]
    """Of each part."""
    ranks: Sequence[Sequence[int]]
    """Of each adapter, by part; 0: it adds nothing to the part."""
    max_rank: int


CASES = {
    "one row": LowRankCase(1, 16, [16], [[3]], 3),
    "odd sizes": LowRankCase(37, 100, [65, 130, 7], [[1, 2, 3], [0, 9, 0], [16, 16, 16]], 16),
    "an adapter without this layer": LowRankCase(20, 48, [32], [[4], [0], [7]], 8),
    "rank 256": LowRankCase(9, 1100, [40, 24], [[256, 100], [65, 1]], 256),
    "rank 100": LowRankCase(33, 64, [140], [[100], [64]], 100),
    "many rows": LowRankCase(600, 40, [24, 8], [[5, 32], [32, 1], [2, 2]], 32),
}


KINDS = ("mixed", "one", "last")
"""Which rows have adapters: most, others than their neighbours; all the same one; the last row alone."""


def numbers_of(case: LowRankCase, kind: str) -> np.ndarray:
    """int32 [T], of each row's adapter; 0: none."""
    count = len(case.ranks)
    if kind == "one":
        return np.full(case.num_rows, count, np.int32)
    numbers = np.zeros(case.num_rows, np.int32)
    if kind == "last":
        numbers[-1] = 1
    else:
        numbers[:] = np.random.default_rng(case.num_rows).integers(0, count + 1, case.num_rows)
    return numbers


def check(case: LowRankCase, kind: str, dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    """tolerance: absolute and relative, of results of about 1."""
    generator = torch.Generator().manual_seed(case.num_inputs)
    weight = torch.empty((sum(case.outputs), case.num_inputs), dtype=dtype, device=device)
    first_rows = [sum(case.outputs[:index]) for index in range(len(case.outputs))]
    rows = TiledRows(len(case.ranks), case.max_rank, case.num_rows + 5, device)
    slots = LowRankSlots(rows, list(zip(first_rows, case.outputs, strict=True))[::-1], weight)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def adapter(ranks: Sequence[int]) -> list[LowRankRows]:
        sizes = zip(first_rows, case.outputs, ranks, strict=True)
        return [
            LowRankRows(
                first,
                (random(rank, case.num_inputs) / case.num_inputs**0.5).to(dtype),
                (random(count, rank) / rank**0.5).to(dtype),
            )
            for first, count, rank in sizes
            if rank
        ]

    adapters = list(map(adapter, case.ranks))
    for number, parts in enumerate(adapters, start=1):
        slots.place(number, adapter([case.max_rank] * len(case.outputs)))  # of which nothing may be left
        slots.place(number, parts)
    numbers = numbers_of(case, kind)
    for earlier in (np.ones(case.num_rows + 5, np.int32), numbers):  # whose tiles nothing may be left of
        rows.stage(earlier, DirectStaging(device))
    sizes = case.num_inputs, sum(case.outputs)
    x, before = (with_gaps(random(case.num_rows, size).to(device, dtype)) for size in sizes)
    expected = before.double()
    for row, number in enumerate(numbers.tolist()):
        for part in adapters[number - 1] if number else ():
            outputs = slice(part.first_row, part.first_row + len(part.up))
            down, up = part.down.to(device).double(), part.up.to(device).double()
            expected[row, outputs] += up @ (down @ x[row].double())
    out = before.clone()
    slots.add(out, x)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    has_none = torch.from_numpy(numbers == 0).to(device)
    assert torch.equal(out[has_none], before[has_none])
    again = before.clone()
    slots.add(again, x)
    assert torch.equal(again, out), "the same in each call"
