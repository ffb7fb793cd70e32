"""The most likely tokens of rows of logits, on CUDA, in two Triton kernels.

The first takes the largest logits of each part of a row, the second the largest of these. A logit and its token are
one integer, whose order is that of the logits and, among equal ones, of the smaller token: so each turn is a single
reduction, and nothing is sorted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A rows, V vocabulary, K largest of each row, P parts of a row

_PART = 8192
_USUAL_COUNT = 32
"""The second kernel has room for so many candidates of each part; more than this compile another one."""
_NUM_WARPS = 8
_LARGEST_ID = 2**31 - 1


def largest_logits(logits: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The K = `count` <= V largest logits of some rows: their tokens, int32 [A, K], and logits, float32 [A, K].

    In descending order; of equal logits, the smaller token comes first. logits: [R, V], of any float dtype. rows: int64
    [A]. A row with NaN has tokens of the vocabulary, whose choice has no meaning.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    assert count <= vocab_size
    assert logits.stride(1) == 1
    num_parts = triton.cdiv(vocab_size, _PART)
    candidates = torch.empty((num_rows, num_parts, count), dtype=torch.int64, device=logits.device)
    token_ids = torch.empty((num_rows, count), dtype=torch.int32, device=logits.device)
    values = torch.empty((num_rows, count), dtype=torch.float32, device=logits.device)
    _largest_of_parts[(num_rows, num_parts)](
        *(logits, logits.stride(0), vocab_size, rows, candidates, count),
        PART=min(_PART, triton.next_power_of_2(vocab_size)),
        LARGEST_ID=_LARGEST_ID,
        num_warps=_NUM_WARPS,
    )
    _largest_of_candidates[(num_rows,)](
        *(candidates, num_parts * count, token_ids, values, count),
        NUM=triton.next_power_of_2(num_parts * max(count, _USUAL_COUNT)),
        LARGEST_ID=_LARGEST_ID,
        num_warps=_NUM_WARPS,
    )
    return token_ids, values


@triton.jit(do_not_specialize=["count"])
def _largest_of_parts(
    logits, row_stride, vocab_size, rows, candidates, count, PART: tl.constexpr, LARGEST_ID: tl.constexpr
):
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + tl.load(rows + index) * row_stride
    offsets = part * PART + tl.arange(0, PART)
    in_row = offsets < vocab_size
    bits = tl.load(row + offsets, mask=in_row, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # in the order of the floats
    left = tl.where(in_row, keys * 4294967296 + (LARGEST_ID - offsets), -9223372036854775808)
    own = candidates + (index * tl.num_programs(1) + part) * count
    for turn in range(count):
        largest = tl.max(left)
        tl.store(own + turn, largest)
        left = tl.where(left == largest, -9223372036854775808, left)


@triton.jit(do_not_specialize=["num_candidates", "count"])
def _largest_of_candidates(
    candidates, num_candidates, token_ids, values, count, NUM: tl.constexpr, LARGEST_ID: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, NUM)
    left = tl.load(
        candidates + index * num_candidates + offsets, mask=offsets < num_candidates, other=-9223372036854775808
    )
    for turn in range(count):
        largest = tl.max(left)
        key = (largest >> 32).to(tl.int32)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        tl.store(token_ids + index * count + turn, (LARGEST_ID - (largest & 0xFFFFFFFF)).to(tl.int32))
        tl.store(values + index * count + turn, bits.to(tl.float32, bitcast=True))
        left = tl.where(left == largest, -9223372036854775808, left)
