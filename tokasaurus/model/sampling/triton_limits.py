"""Thresholds of min_p, top_k and top_p in a Triton kernel, without sorting the vocabulary.

One pass over a row keeps the four largest adjusted logits of each of 2,048 residue classes of token ids, in registers.
A threshold found among these is a lower bound, and it is exact if no class has its fourth above it: true of nearly all
limits that leave up to 700 tokens, and of wide ones with many ties. Any other threshold is searched in the vocabulary,
between bounds that the lists give. This was chosen over histograms (they count tokens, but top_p needs sums of their
probabilities) and over a buffer of candidates (memory for each row, a barrier and a scan for each block).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.model.sampling.triton_rows import COLUMN, block_size, load_block, open_row

# R rows that sample, V vocabulary

_NUM_WARPS = 8
_MOST_REGISTERS = 128  # of a thread, so that two programs run on a multiprocessor


def find_least(
    num_rows: int, vocab_size: int, device: torch.device, *row_arguments: Tensor | int, **flags: bool
) -> Tensor:
    """The smallest adjusted logit inside the limits of each row, float32 [R]; -inf for rows without limits.

    Tokens with equal adjusted logits are kept or excluded together. row_arguments, flags: as for `open_row`."""
    least = torch.empty(num_rows, dtype=torch.float32, device=device)
    _find_least[(num_rows,)](
        *row_arguments,
        least,
        **flags,
        TEMPERATURE=COLUMN["temperature"],
        TOP_P=COLUMN["top_p"],
        TOP_K=COLUMN["top_k"],
        MIN_P=COLUMN["min_p"],
        BLOCK=block_size(vocab_size),
        num_warps=_NUM_WARPS,
        maxnreg=_MOST_REGISTERS,
    )
    return least


@triton.jit
def _key(x):
    """int64 keys in the order of the floats, one after the other."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _of_key(key):
    """The float whose key this is."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(values, largest, least):
    """exp(values - largest) of the values that are at least `least`."""
    return tl.where(values >= least, tl.exp(values - largest), 0.0)


@triton.jit
def _least_listed(first, second, third, fourth, largest, least, counts, target, lowest):
    """The smallest float from `lowest` to `largest` with less than `target` above it, of the listed tokens' amounts.

    counts: the amount of a token is 1; otherwise its mass, if it has at least `least`."""
    of_first = tl.where(counts, 1.0, _mass(first, largest, least))
    of_second = tl.where(counts, 1.0, _mass(second, largest, least))
    of_third = tl.where(counts, 1.0, _mass(third, largest, least))
    of_fourth = tl.where(counts, 1.0, _mass(fourth, largest, least))
    low, high = _key(lowest) - 1, _key(largest)
    while high - low > 1:
        middle = low + (high - low) // 2
        bound = _of_key(middle)
        above = tl.where(first > bound, of_first, 0.0) + tl.where(second > bound, of_second, 0.0)
        above += tl.where(third > bound, of_third, 0.0) + tl.where(fourth > bound, of_fourth, 0.0)
        is_less = tl.sum(above) < target
        low = tl.where(is_less, low, middle)
        high = tl.where(is_less, middle, high)
    return _of_key(high)


@triton.jit
def _least_of_all(
    row, largest, least, counts, target, lowest, highest,
    HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_least_listed`, of all tokens, from `lowest` to `highest`: one of these is the value of a token.

    Each pass leaves a quarter, which then begins and ends with values of tokens."""
    low, high = _key(lowest) - 1, _key(highest)
    turn = 0
    while high - low > 1:
        # Quarters of the values, and sometimes of the keys: values may be dense where keys are not.
        low_value, high_value = _of_key(low + 1), _of_key(high)
        width = tl.minimum(high_value - low_value, 64.0)
        step = (high - low + 3) // 4
        by_value = turn % 4 < 3
        first = tl.where(by_value, _key(high_value - 0.75 * width), low + step)
        second = tl.where(by_value, _key(high_value - 0.5 * width), low + 2 * step)
        third = tl.where(by_value, _key(high_value - 0.25 * width), low + 3 * step)
        first = tl.minimum(tl.maximum(first, low + 1), high)
        second = tl.minimum(tl.maximum(second, low + 1), high)
        third = tl.minimum(tl.maximum(third, low + 1), high)
        first_bound, second_bound, third_bound = _of_key(first), _of_key(second), _of_key(third)
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        smallest_of = tl.full((BLOCK,), float("inf"), tl.float32)
        largest_of = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, row[1], BLOCK):
            _, _, adjusted, _ = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
            amount = tl.where(counts, 1.0, _mass(adjusted, largest, least))
            above_first += tl.where(adjusted > first_bound, amount, 0.0)
            above_second += tl.where(adjusted > second_bound, amount, 0.0)
            above_third += tl.where(adjusted > third_bound, amount, 0.0)
            smallest_of = tl.minimum(smallest_of, tl.where(adjusted >= low_value, adjusted, float("inf")))
            largest_of = tl.maximum(largest_of, tl.where(adjusted <= high_value, adjusted, float("-inf")))
        is_first, is_second = tl.sum(above_first) < target, tl.sum(above_second) < target
        is_third = tl.sum(above_third) < target
        lower = tl.where(is_first, low, tl.where(is_second, first, tl.where(is_third, second, third)))
        higher = tl.where(is_first, first, tl.where(is_second, second, tl.where(is_third, third, high)))
        high = tl.minimum(higher, tl.maximum(_key(tl.max(largest_of)), low + 1))
        low = tl.minimum(tl.maximum(lower, _key(tl.min(smallest_of)) - 1), high - 1)
        turn += 1
    return _of_key(high)


@triton.jit
def _mass_inside(row, largest, least, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of all tokens with at least `least`."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, row[1], BLOCK):
        _, _, adjusted, _ = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
        sums += _mass(adjusted, largest, least)
    return tl.sum(sums)


@triton.jit
def _least_inside(
    row, top_p, top_k, min_p, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest adjusted logit inside the limits: min_p, then top_k, then top_p."""
    first = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    third = tl.full((BLOCK,), float("-inf"), tl.float32)
    fourth = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)  # of exp(adjusted - first)
    for start in range(0, row[1], BLOCK):
        _, _, adjusted, _ = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
        rest = tl.minimum(first, adjusted)
        if top_p < 1.0:
            higher = tl.maximum(first, adjusted)
            ratio = tl.where(higher > float("-inf"), tl.exp(rest - higher), 0.0)
            sums = tl.where(adjusted > first, sums * ratio + 1.0, sums + ratio)
        first = tl.maximum(first, adjusted)
        next_rest = tl.minimum(second, rest)
        second = tl.maximum(second, rest)
        rest = tl.minimum(third, next_rest)
        third = tl.maximum(third, next_rest)
        fourth = tl.maximum(fourth, rest)
    largest = tl.max(first)
    least = tl.full((), float("-inf"), tl.float32)
    if (largest > float("-inf")) & (largest < float("inf")):
        if min_p > 0.0:
            least = largest + tl.log(min_p)
        # No token has more that is not listed.
        unlisted = tl.where(row[1] <= 4 * BLOCK, float("-inf"), tl.max(fourth))
        total = tl.sum(sums * tl.exp(first - largest))
        lowest, highest = least, largest
        unsolved = 2  # the limit whose threshold the lists do not have: 0 is top_k, 1 is top_p, 2 is none
        for limit in range(2):
            counts = limit == 0
            is_set = tl.where(counts, (top_k > 0) & (top_k < row[1]), top_p < 1.0)
            if is_set & (unsolved == 2):
                lowest = tl.where(counts, float("-inf"), tl.maximum(least, largest - 105.0))
                unsolved = limit
                if counts | (least == float("-inf")) | (unlisted < least):
                    target = top_k.to(tl.float32)
                    if limit == 1:
                        mass = total
                        if least > float("-inf"):
                            of_lists = _mass(first, largest, least) + _mass(second, largest, least)
                            of_lists += _mass(third, largest, least) + _mass(fourth, largest, least)
                            mass = tl.sum(of_lists)
                        target = top_p * mass
                    lowest = _least_listed(first, second, third, fourth, largest, least, counts, target, lowest)
                    highest = unlisted
                    if unlisted <= lowest:
                        least = tl.maximum(least, lowest)
                        unsolved = 2
        for limit in range(2):
            counts = limit == 0
            is_set = tl.where(counts, (top_k > 0) & (top_k < row[1]), top_p < 1.0)
            if is_set & (limit >= unsolved):
                target = top_k.to(tl.float32)
                if limit == 1:
                    mass = total
                    if least > float("-inf"):
                        mass = _mass_inside(row, largest, least, HAS_CHANGED, HAS_MASKS, BLOCK)
                    target = top_p * mass
                if limit > unsolved:
                    lowest = tl.maximum(least, largest - 105.0)
                    highest = largest
                bound = _least_of_all(
                    row, largest, least, counts, target, lowest, highest, HAS_CHANGED, HAS_MASKS, BLOCK
                )
                least = tl.maximum(least, bound)
    return least


@triton.jit(do_not_specialize=["first"])
def _find_least(
    first, logits, row_stride, vocab_size, params, params_stride, changed_index, changed_logits, mask_index, mask_bits,
    num_words, least_of_row, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    index = first + own
    own_params = params + index * params_stride
    top_p = tl.load(own_params + TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(own_params + TOP_K)
    min_p = tl.load(own_params + MIN_P).to(tl.float32, bitcast=True)
    asked = tl.load(own_params + TEMPERATURE).to(tl.float32, bitcast=True)
    least = tl.full((), float("-inf"), tl.float32)
    if ((top_p < 1.0) | (top_k > 0) | (min_p > 0.0)) & (asked > 0.0):
        row = open_row(
            index, logits, row_stride, vocab_size, params, params_stride, changed_index, changed_logits, mask_index,
            mask_bits, num_words, TEMPERATURE, HAS_CHANGED, HAS_MASKS,
        )  # fmt: skip
        least = _least_inside(row, top_p, top_k, min_p, HAS_CHANGED, HAS_MASKS, BLOCK)
    tl.store(least_of_row + own, least)
