"""Triton kernels for what adapters add to a linear layer: one grouped product before the expansion, and the expansion,
which adds to the layer's outputs. Source: arXiv 2106.09685.

Rows come sorted by adapter, in tiles of one adapter each. A launch depends on the number of rows alone: programs read
from the device which tiles there are, so that one recording serves any mix of adapters. `RowAdapters.added` is the
plain torch of this.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# T rows, N adapters at a time, P parts of a fused layer, R largest rank, K inputs, O outputs

_COLUMNS = 128
"""Outputs of a program, of one part."""

_INPUT_BYTES = 256
"""Bytes of a row's inputs that a program multiplies at a time."""

_FEW_ROWS = 512
_TILE_OF_FEW, _TILE_OF_MANY = 16, 64
"""Rows of a tile, for up to _FEW_ROWS rows and for more."""
_MAX_SPLITS, _SPLIT_INPUTS = 8, 512
"""Few rows make few programs: each tile's inputs are split, into so many pieces of at least so many inputs."""


def rows_per_tile(num_rows: int) -> int:
    """Most rows of a tile, for a forward of so many rows."""
    return _TILE_OF_FEW if num_rows <= _FEW_ROWS else _TILE_OF_MANY


def max_tiles(num_rows: int, num_adapters: int) -> int:
    """Most tiles of a forward of so many rows."""
    return min(num_rows, -(-num_rows // rows_per_tile(num_rows)) + num_adapters)


def column_blocks(parts: list[tuple[int, int]]) -> Tensor:
    """(first output, outputs) of each part of a layer -> int32 [blocks, 3]: the part, first and end of each block."""
    blocks = [
        (part, begin, min(begin + _COLUMNS, first + count))
        for part, (first, count) in enumerate(parts)
        for begin in range(first, first + count, _COLUMNS)
    ]
    return torch.tensor(blocks, dtype=torch.int32)


def add_low_rank(
    out: Tensor, x: Tensor, order: Tensor, tiles: Tensor, down: Tensor, up: Tensor, ranks: Tensor, blocks: Tensor
) -> None:
    """Add to out [T, O] what the rows' adapters give for x [T, K].

    order: int32, rows sorted by adapter. tiles: int32, of each tile the adapter's number, from 1 on, and where its rows
    begin and end in `order`; 0 for the number: no tile. down: [N, P, R, K]. up: [N, O, R]. Beyond an adapter's rank,
    both are zeros. ranks: int32 [N + 1, P], by number; 0 where nothing is added. blocks: as from `column_blocks`."""
    num_rows, num_inputs = x.shape
    num_adapters, num_parts, max_rank, _ = down.shape
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    num_tiles = max_tiles(num_rows, num_adapters)
    if not num_tiles:
        return
    rows = rows_per_tile(num_rows)
    splits = max(1, min(_MAX_SPLITS, num_inputs // _SPLIT_INPUTS)) if rows == _TILE_OF_FEW else 1
    rank_block = min(64, max_rank)
    num_rank_blocks = max_rank // rank_block
    inner = torch.empty((num_rows, splits, num_parts, max_rank), dtype=torch.float32, device=x.device)
    sizes = {"NUM_PARTS": num_parts, "MAX_RANK": max_rank, "ROWS": rows, "RANKS": rank_block, "SPLITS": splits}
    _shrink_tile[(num_tiles, num_parts * num_rank_blocks, splits)](
        *(x, x.stride(0), order, tiles, ranks, down, inner),
        NUM_INPUTS=num_inputs,
        INPUTS=_INPUT_BYTES // x.element_size(),
        **sizes,
    )
    _expand_tile[(num_tiles, len(blocks))](
        *(inner, order, tiles, ranks, blocks, up, out, out.stride(0)),
        NUM_OUTPUTS=up.shape[1],
        COLUMNS=_COLUMNS,
        PRECISION="ieee" if up.dtype == torch.float32 else "tf32",  # which holds all numbers of 16 bits
        **sizes,
    )


@triton.jit
def _shrink_tile(
    x, row_stride, order, tiles, ranks, down, inner, NUM_INPUTS: tl.constexpr, INPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """inner: float32 [rows of `order`, splits, parts, ranks]."""
    number = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1) // (MAX_RANK // RANKS)
    first_rank = tl.program_id(1) % (MAX_RANK // RANKS) * RANKS
    if first_rank < tl.load(ranks + number * NUM_PARTS + part):
        places = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
        in_tile = places < tl.load(tiles + 3 * tl.program_id(0) + 2)
        rows = tl.load(order + places, mask=in_tile, other=0).to(tl.int64)
        ranks_here = first_rank + tl.arange(0, RANKS)
        own_down = down + ((number - 1) * NUM_PARTS + part) * MAX_RANK * NUM_INPUTS
        per_split: tl.constexpr = (NUM_INPUTS + SPLITS * INPUTS - 1) // (SPLITS * INPUTS) * INPUTS
        begin = tl.program_id(2) * per_split
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        for offset in range(0, per_split, INPUTS):
            inputs = begin + offset + tl.arange(0, INPUTS)
            are_inputs = inputs < NUM_INPUTS
            xs = tl.load(
                x + rows[:, None] * row_stride + inputs[None, :], mask=in_tile[:, None] & are_inputs[None, :], other=0.0
            )
            numbers = tl.load(
                own_down + ranks_here[None, :] * NUM_INPUTS + inputs[:, None], mask=are_inputs[:, None], other=0.0
            )
            sums = tl.dot(xs, numbers, sums, input_precision="ieee")
        target = ((places.to(tl.int64) * SPLITS + tl.program_id(2)) * NUM_PARTS + part) * MAX_RANK
        tl.store(inner + target[:, None] + ranks_here[None, :], sums, mask=in_tile[:, None])


@triton.jit
def _expand_tile(
    inner, order, tiles, ranks, blocks, up, out, row_stride, NUM_OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    number = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    part = tl.load(blocks + 3 * tl.program_id(1))
    rank = tl.load(ranks + number * NUM_PARTS + part)
    if rank > 0:
        places = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
        in_tile = places < tl.load(tiles + 3 * tl.program_id(0) + 2)
        rows = tl.load(order + places, mask=in_tile, other=0).to(tl.int64)
        columns = tl.load(blocks + 3 * tl.program_id(1) + 1) + tl.arange(0, COLUMNS)
        in_block = columns < tl.load(blocks + 3 * tl.program_id(1) + 2)
        own_up = up + ((number - 1) * NUM_OUTPUTS + columns[None, :]) * MAX_RANK
        own_inner = inner + (places.to(tl.int64)[:, None] * SPLITS * NUM_PARTS + part) * MAX_RANK
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first_rank in range(0, rank, RANKS):
            ranks_here = first_rank + tl.arange(0, RANKS)
            of_rows = tl.zeros((ROWS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                source = own_inner + split * NUM_PARTS * MAX_RANK + ranks_here[None, :]
                of_rows += tl.load(source, mask=in_tile[:, None], other=0.0)
            numbers = tl.load(own_up + ranks_here[:, None], mask=in_block[None, :], other=0.0).to(tl.float32)
            sums = tl.dot(of_rows, numbers, sums, input_precision=PRECISION)
        target = out + rows[:, None] * row_stride + columns[None, :]
        is_there = in_tile[:, None] & in_block[None, :]
        total = tl.load(target, mask=is_there, other=0.0).to(tl.float32) + sums
        tl.store(target, total.to(out.dtype.element_ty), mask=is_there)
