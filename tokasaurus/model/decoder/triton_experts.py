"""A Triton kernel for the products of experts with their own rows, where torch's grouped product does not run.

Which rows an expert has is read from the device: one recording serves any choice of the router. `product_by_masks` of
`experts` is the plain torch of this.
"""

import triton
import triton.language as tl
from torch import Tensor

# R rows, sorted by expert, N experts, O outputs

_COLUMNS = 128
"""Outputs of a program."""

_INPUT_BYTES = 128
"""Bytes of a row's inputs that a program multiplies at a time."""

_TILE_OF_FEW, _TILE_OF_MANY = 16, 64
_FEW_ROWS = 32
"""Rows of a tile, for up to _FEW_ROWS rows an expert, in the mean, and for more."""


def rows_per_tile(num_rows: int, num_experts: int) -> int:
    return _TILE_OF_FEW if num_rows <= _FEW_ROWS * num_experts else _TILE_OF_MANY


def multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, in], weight [N, O, in], ends int32 [N] -> [R, O]: rows up to ends[n], from those of n - 1 on, times the
    weight of n. Rows behind the last end have no meaning."""
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x.shape, weight.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty((num_rows, num_outputs))
    rows = rows_per_tile(num_rows, num_experts)
    num_tiles = min(num_rows, -(-num_rows // rows) + num_experts)  # at most one is not full of each expert
    if num_tiles:
        _multiply_tile[(num_tiles, triton.cdiv(num_outputs, _COLUMNS))](
            *(x, x.stride(0), weight, ends, out),
            NUM_EXPERTS=num_experts,
            EXPERTS=triton.next_power_of_2(num_experts),
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=num_outputs,
            ROWS=rows,
            COLUMNS=_COLUMNS,
            INPUTS=_INPUT_BYTES // x.element_size(),
        )
    return out


@triton.jit
def _multiply_tile(
    x, row_stride, weight, ends, out, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Of all tiles of all experts, one after another, the program's has its number; there may be fewer."""
    experts = tl.arange(0, EXPERTS)
    own_ends = tl.load(ends + experts, mask=experts < NUM_EXPERTS, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < NUM_EXPERTS), other=0)
    num_tiles = tl.where(experts < NUM_EXPERTS, (own_ends - starts + ROWS - 1) // ROWS, 0)
    tiles_until = tl.cumsum(num_tiles, axis=0)
    tile = tl.program_id(0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), axis=0)
    if expert < NUM_EXPERTS:
        is_own = experts == expert
        first_tile = tl.sum(tl.where(is_own, tiles_until - num_tiles, 0), axis=0)
        begin = tl.sum(tl.where(is_own, starts, 0), axis=0) + (tile - first_tile) * ROWS
        rows = begin + tl.arange(0, ROWS)
        in_tile = rows < tl.sum(tl.where(is_own, own_ends, 0), axis=0)
        rows = rows.to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_weight = columns < NUM_OUTPUTS
        own_weight = weight + (expert.to(tl.int64) * NUM_OUTPUTS + columns[None, :]) * NUM_INPUTS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for offset in range(0, NUM_INPUTS, INPUTS):
            inputs = offset + tl.arange(0, INPUTS)
            are_inputs = inputs < NUM_INPUTS
            source = x + rows[:, None] * row_stride + inputs[None, :]
            numbers = tl.load(source, mask=in_tile[:, None] & are_inputs[None, :], other=0.0)
            factors = tl.load(own_weight + inputs[:, None], mask=in_weight[None, :] & are_inputs[:, None], other=0.0)
            sums = tl.dot(numbers, factors, sums, input_precision="ieee")
        target = out + rows[:, None] * NUM_OUTPUTS + columns[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=in_tile[:, None] & in_weight[None, :])
