"""The limits, the last of rules.RULES, in a Triton kernel: their thresholds, without sorting the vocabulary.

One pass over a row keeps the four largest adjusted logits of each of 2,048 residue classes of token ids, in registers.
A threshold found among these is a lower bound, and it is exact if no class has its fourth above it: true of nearly all
limits that leave up to 700 tokens, and of wider ones with many ties. Otherwise the amount above the largest fourth is
exact, and lists of what is below are made next; passes that only count narrow down what is far. This was chosen over
histograms (they count tokens, but top_p needs sums of their probabilities) and over a buffer of candidates (memory for
each row, a barrier and a scan for each block).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.model.sampling.triton_rows import COLUMN, block_size, load_block, open_row

# R rows that sample, V vocabulary

_NUM_WARPS = 16  # so that the lists fit a program's registers


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
def _amounts(lists, largest, least, counts):
    """1 for each listed token if `counts`, otherwise its mass."""
    first, second, third, fourth = lists
    return (
        tl.where(counts, 1.0, _mass(first, largest, least)),
        tl.where(counts, 1.0, _mass(second, largest, least)),
        tl.where(counts, 1.0, _mass(third, largest, least)),
        tl.where(counts, 1.0, _mass(fourth, largest, least)),
    )


@triton.jit
def _amount_above(lists, amounts, bound):
    """The amount of the listed tokens above `bound`."""
    above = tl.where(lists[0] > bound, amounts[0], 0.0) + tl.where(lists[1] > bound, amounts[1], 0.0)
    above += tl.where(lists[2] > bound, amounts[2], 0.0) + tl.where(lists[3] > bound, amounts[3], 0.0)
    return tl.sum(above)


@triton.jit
def _search_lists(lists, amounts, target, lowest, highest, above):
    """The smallest float from `lowest` to `highest` with less than `target` above it, of the listed tokens' amounts.

    above: the amount of tokens above `highest`, which are not listed."""
    low, high = _key(lowest) - 1, _key(highest)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_less = above + _amount_above(lists, amounts, _of_key(middle)) < target
        low = tl.where(is_less, low, middle)
        high = tl.where(is_less, middle, high)
    return _of_key(high)


@triton.jit
def _narrow(
    row, largest, least, counts, target, lowest, highest, above, turn,
    HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(`lowest`, `highest`, the amount of tokens above it) with few tokens between them, by passes over all tokens.

    Parameters as in `_amounts` and `_search_lists`. Precondition: one of the floats from `lowest` to `highest` is the
    value of a token with less than `target` above it. Each pass leaves about a quarter, and at least one is made.
    turn: which kind of quarters the first pass makes."""
    low, high = _key(lowest) - 1, _key(highest)
    above_low, above_high = row[1], 0  # numbers of tokens
    while (high - low > 1) & (above_low - above_high > BLOCK // 4):
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
        amounts_first = tl.zeros((BLOCK,), tl.float32)
        amounts_second = tl.zeros((BLOCK,), tl.float32)
        amounts_third = tl.zeros((BLOCK,), tl.float32)
        numbers_first = tl.zeros((BLOCK,), tl.int32)
        numbers_second = tl.zeros((BLOCK,), tl.int32)
        numbers_third = tl.zeros((BLOCK,), tl.int32)
        smallest_of = tl.full((BLOCK,), float("inf"), tl.float32)
        largest_of = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, row[1], BLOCK):
            _, _, adjusted, _ = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
            amount = tl.where(counts, 1.0, _mass(adjusted, largest, least))
            amounts_first += tl.where(adjusted > first_bound, amount, 0.0)
            amounts_second += tl.where(adjusted > second_bound, amount, 0.0)
            amounts_third += tl.where(adjusted > third_bound, amount, 0.0)
            numbers_first += (adjusted > first_bound).to(tl.int32)
            numbers_second += (adjusted > second_bound).to(tl.int32)
            numbers_third += (adjusted > third_bound).to(tl.int32)
            smallest_of = tl.minimum(smallest_of, tl.where(adjusted >= low_value, adjusted, float("inf")))
            largest_of = tl.maximum(largest_of, tl.where(adjusted <= high_value, adjusted, float("-inf")))
        of_first, of_second, of_third = tl.sum(amounts_first), tl.sum(amounts_second), tl.sum(amounts_third)
        is_first, is_second, is_third = of_first < target, of_second < target, of_third < target
        number_first, number_second, number_third = tl.sum(numbers_first), tl.sum(numbers_second), tl.sum(numbers_third)
        lower = tl.where(is_first, low, tl.where(is_second, first, tl.where(is_third, second, third)))
        higher = tl.where(is_first, first, tl.where(is_second, second, tl.where(is_third, third, high)))
        above = tl.where(is_first, of_first, tl.where(is_second, of_second, tl.where(is_third, of_third, above)))
        above_low = tl.where(
            is_first, above_low, tl.where(is_second, number_first, tl.where(is_third, number_second, number_third))
        )
        above_high = tl.where(
            is_first, number_first, tl.where(is_second, number_second, tl.where(is_third, number_third, above_high))
        )
        # The result begins and ends with values of tokens.
        high = tl.minimum(higher, tl.maximum(_key(tl.max(largest_of)), low + 1))
        low = tl.minimum(tl.maximum(lower, _key(tl.min(smallest_of)) - 1), high - 1)
        turn += 1
    return _of_key(low + 1), _of_key(high), above


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
    has_lists = 0  # whether these are the largest of each class, of the tokens with at most `highest`
    highest = tl.full((), float("inf"), tl.float32)
    lowest = tl.full((), float("-inf"), tl.float32)
    unlisted = lowest  # no token that is not listed has more
    largest = highest  # known after the first pass
    least = lowest
    total = tl.full((), 0.0, tl.float32)  # mass of all tokens
    target = total
    above = total  # amount of the tokens above `highest`
    has_target = 0
    attempts = 0
    limit = 0  # 0: top_k, 1: top_p
    while limit < 2:
        if has_lists == 0:
            first = tl.full((BLOCK,), float("-inf"), tl.float32)
            second = tl.full((BLOCK,), float("-inf"), tl.float32)
            third = tl.full((BLOCK,), float("-inf"), tl.float32)
            fourth = tl.full((BLOCK,), float("-inf"), tl.float32)
            sums = tl.zeros((BLOCK,), tl.float32)  # of exp(adjusted - first)
            for start in range(0, row[1], BLOCK):
                _, _, adjusted, _ = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
                adjusted = tl.where(adjusted <= highest, adjusted, float("-inf"))
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
            has_lists = 1
            unlisted = tl.where(row[1] <= 4 * BLOCK, float("-inf"), tl.max(fourth))
            if largest == float("inf"):
                largest = tl.max(first)
                if (largest > float("-inf")) & (largest < float("inf")):
                    total = tl.sum(sums * tl.exp(first - largest))
                    if min_p > 0.0:
                        least = largest + tl.log(min_p)
                else:
                    limit = 2
        lists = (first, second, third, fourth)
        counts = limit == 0
        is_set = tl.where(counts, (top_k > 0) & (top_k < row[1]), top_p < 1.0)
        if is_set & (limit < 2):
            if has_target == 0:
                has_target = 1
                attempts = 0
                above = tl.full((), 0.0, tl.float32)
                target = top_k.to(tl.float32)
                lowest = tl.where(counts, float("-inf"), tl.maximum(least, largest - 105.0))
                if limit == 1:
                    mass = total
                    if least > float("-inf"):
                        if unlisted < least:
                            amounts = _amounts(lists, largest, least, False)
                            mass = tl.sum(amounts[0] + amounts[1] + (amounts[2] + amounts[3]))
                        else:
                            mass = _mass_inside(row, largest, least, HAS_CHANGED, HAS_MASKS, BLOCK)
                    target = top_p * mass
            amounts = _amounts(lists, largest, least, counts)
            lowest = _search_lists(lists, amounts, target, lowest, tl.minimum(highest, largest), above)
            if unlisted <= lowest:
                least = tl.maximum(least, lowest)
                limit += 1
                has_target = 0
                if highest < float("inf"):
                    highest = tl.full((), float("inf"), tl.float32)
                    has_lists = 0
            else:
                above += _amount_above(lists, amounts, unlisted)
                is_far = (above < 0.5 * target) | (unlisted == highest) | (attempts > 0)
                highest = unlisted
                has_lists = 0
                attempts += 1
                if is_far:
                    lowest, highest, above = _narrow(
                        row, largest, least, counts, target, lowest, highest, above, attempts - 1,
                        HAS_CHANGED, HAS_MASKS, BLOCK,
                    )  # fmt: skip
                    if lowest == highest:  # found: no need to list what is between
                        unlisted = lowest
                        has_lists = 1
        else:
            limit += 1
    return least


@triton.jit(do_not_specialize=["first"])
def _find_least(
    first, logits, row_stride, vocab_size, row_params, params_stride, changed_index, changed_logits, mask_index,
    mask_bits, num_words, least_of_row, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    index = first + own
    own_params = row_params + index * params_stride
    top_p = tl.load(own_params + TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(own_params + TOP_K)
    min_p = tl.load(own_params + MIN_P).to(tl.float32, bitcast=True)
    asked = tl.load(own_params + TEMPERATURE).to(tl.float32, bitcast=True)
    least = tl.full((), float("-inf"), tl.float32)
    if ((top_p < 1.0) | (top_k > 0) | (min_p > 0.0)) & (asked > 0.0):
        row = open_row(
            index, logits, row_stride, vocab_size, row_params, params_stride, changed_index, changed_logits, mask_index,
            mask_bits, num_words, TEMPERATURE, HAS_CHANGED, HAS_MASKS,
        )  # fmt: skip
        least = _least_inside(row, top_p, top_k, min_p, HAS_CHANGED, HAS_MASKS, BLOCK)
    tl.store(least_of_row + own, least)
