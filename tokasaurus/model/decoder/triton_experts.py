"""Triton kernels of layers with experts: the router's choice; the rows sorted by expert; and the products of experts
with their own rows, where torch's grouped product does not run. One launch each.

Which rows an expert has is read from the device: one recording serves any choice of the router. `choose_by_torch`,
`sort_by_torch` and `product_by_masks` of `experts` are the plain torch of this.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.checkpoint.spec import RouterSpec

# T tokens, each with K chosen ones of N experts; R rows of experts, O outputs

_COLUMNS = 128
"""Outputs of a program."""

_INPUT_BYTES = 128
"""Bytes of a row's inputs that a program multiplies at a time."""

_TILE_OF_FEW, _TILE_OF_MANY = 16, 64
_FEW_ROWS = 32
"""Rows of a tile, for up to _FEW_ROWS rows an expert, in the mean, and for more."""


_SORTED_ROWS = 1024
"""Rows that a program looks at at a time."""


def choose(logits: Tensor, spec: RouterSpec, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As experts.choose_experts, of a router without groups and sparse mixers."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    chosen = torch.empty((num_tokens, spec.num_chosen), dtype=torch.int64, device=logits.device)
    weights = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _choose_row[(num_tokens,)](
            *(logits, logits.stride(0), logits if choice_bias is None else choice_bias, chosen, weights),
            *(float(spec.scale), float(spec.min_sum)),
            NUM_EXPERTS=num_experts,
            EXPERTS=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=spec.num_chosen,
            CHOSEN=triton.next_power_of_2(spec.num_chosen),
            SCORES=spec.scores,
            HAS_BIAS=choice_bias is not None,
            NORMALIZES=spec.normalizes,
        )
    return chosen, weights


def sort_rows(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """As experts.sort_rows."""
    order = torch.empty_like(experts)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    _sort_expert[(num_experts + 1,)](experts, order, ends, len(experts), NUM_EXPERTS=num_experts, BLOCK=_SORTED_ROWS)
    return order, ends


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
def _choose_row(
    logits, row_stride, choice_bias, chosen, weights, scale, min_sum, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """As experts.largest, the largest of integers in the order of scores, the first of equal ones."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    scores = tl.load(logits + token * row_stride + experts, mask=is_expert, other=float("-inf"))
    if SCORES == "softmax":
        powers = tl.exp(scores - tl.max(scores, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    for_choice = scores
    if HAS_BIAS:
        for_choice += tl.load(choice_bias + experts, mask=is_expert, other=0.0)
    bits = tl.where(for_choice == 0.0, 0.0, for_choice).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(is_expert, (ordered << 32) | (EXPERTS - 1 - experts), -(1 << 63))
    places = tl.arange(0, CHOSEN)
    in_row = places < NUM_CHOSEN
    own = tl.zeros((CHOSEN,), tl.int64)
    of_own = tl.zeros((CHOSEN,), tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        expert = EXPERTS - 1 - (tl.max(keys, axis=0) & 0xFFFFFFFF)
        score = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        own = tl.where(places == place, expert, own)
        of_own = tl.where(places == place, score, of_own)
        keys = tl.where(experts == expert, -(1 << 63), keys)
    if SCORES == "softmax_of_chosen":
        powers = tl.where(in_row, tl.exp(of_own - tl.max(tl.where(in_row, of_own, float("-inf")), axis=0)), 0.0)
        of_own = powers / tl.sum(powers, axis=0)
    elif SCORES == "sigmoid_of_chosen":
        of_own = 1.0 / (1.0 + tl.exp(-of_own))
    if NORMALIZES:
        of_own /= tl.maximum(tl.sum(tl.where(in_row, of_own, 0.0), axis=0), min_sum)
    tl.store(chosen + token * NUM_CHOSEN + places, own, mask=in_row)
    tl.store(weights + token * NUM_CHOSEN + places, of_own * scale, mask=in_row)


@triton.jit(do_not_specialize=["num_rows"])
def _sort_expert(experts, order, ends, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each expert, and one for rows that no expert has: it counts the rows before its own."""
    expert = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for offset in range(0, num_rows, BLOCK):
        own = tl.load(experts + offset + rows, mask=offset + rows < num_rows, other=NUM_EXPERTS + 1)
        before += (own < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    for offset in range(0, num_rows, BLOCK):
        own = tl.load(experts + offset + rows, mask=offset + rows < num_rows, other=NUM_EXPERTS + 1)
        is_own = (own == expert).to(tl.int32)
        target = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(order + target, (offset + rows).to(tl.int64), mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    tl.store(ends + expert, place, mask=expert < NUM_EXPERTS)


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
