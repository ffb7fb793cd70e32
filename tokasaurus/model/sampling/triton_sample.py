"""Sampling on CUDA in one Triton kernel: one program for each row of logits.

`sample.py` is its readable reference; the noise is that of `noise.py`, so that all three samplers draw the same tokens.
A row without limits takes one pass over its logits. Limits need thresholds: they are found by search over the
order-preserving integer keys of float32, 17 passes each, without sorting the vocabulary. Tokens with equal adjusted
logits are kept or excluded together, as in the reference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.messages.sampling import SamplingParams

# R rows that sample, V vocabulary, C rows with changed logits, A rows with a mask

_BLOCK = 2048
_NUM_WARPS = 8
_COLUMN = {name: index for index, name in enumerate(SamplingParams._fields)}


class Drawn(NamedTuple):
    """What one kernel computes."""

    tokens: Tensor
    """int64 [R]; -1 for rows with a logit that is NaN or positive infinity."""
    logits: Tensor
    """float32 [R], the tokens' logits, unchanged."""
    normalizers: Tensor
    """float32 [R], the log-sum-exp of each row of unchanged logits."""


def draw(
    logits: Tensor,
    own: slice,
    device_params: Tensor,
    noise_keys: Tensor,
    changed: tuple[Tensor, Tensor] | None,
    masks: tuple[Tensor, Tensor] | None,
) -> Drawn:
    """Draw a token from some rows of logits [R, V], of any float dtype.

    own: which rows; R in Drawn is their number. device_params: int32 [R, F], from params_to_device. noise_keys: int64
    [R, 2]. changed: (int32 [R], float32 [C, V]): index of a row's changed logits, or less than 0. masks: (int32 [R],
    int32 [A, words]): index of a row's bits, or -1; see TokenMasks."""
    num_rows, vocab_size = own.stop - own.start, logits.shape[1]
    device = logits.device
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    normalizers = torch.empty(num_rows, dtype=torch.float32, device=device)
    changed_index, changed_logits = (device_params, logits) if changed is None else changed
    mask_index, mask_bits = (device_params, device_params) if masks is None else masks
    _draw_row[(num_rows,)](
        *(own.start, logits, logits.stride(0), vocab_size, device_params, device_params.stride(0), noise_keys),
        *(changed_index, changed_logits, mask_index, mask_bits, mask_bits.shape[1]),
        *(tokens, chosen, normalizers),
        HAS_CHANGED=changed is not None,
        HAS_MASKS=masks is not None,
        TEMPERATURE=_COLUMN["temperature"],
        TOP_P=_COLUMN["top_p"],
        TOP_K=_COLUMN["top_k"],
        MIN_P=_COLUMN["min_p"],
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=_NUM_WARPS,
    )
    return Drawn(tokens, chosen, normalizers)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(hashed):
    """The u of `gumbel_noise`, from uint32 hashes: (hash + 0.5) / 2^32, rounded once.

    float32 holds either half of the bits exactly, the lower one also with 0.5 added: only their sum is rounded."""
    high = (hashed >> 16).to(tl.float32) * 1.52587890625e-05  # 2^-16
    low = ((hashed & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(high + low, 0.99999994)


@triton.jit
def _gumbel(token_ids, first_key, second_key):
    """As `gumbel_noise`: -log(-log1p(-u))."""
    first = _mix32(token_ids.to(tl.uint32) * 0x9E3779B1 + first_key)
    uniform = _uniform(_mix32(first ^ second_key))
    # log1p(-u) by Kahan's formula: the rounding of 1 - u cancels.
    rest = 1.0 - uniform
    log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / tl.where(rest == 1.0, 1.0, rest - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def _key(x):
    """int32 keys in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _adjusted(
    raw, offsets, in_row, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """(raw logits after rules and mask, divided by the temperature; whether a token is allowed)"""
    value = raw
    is_allowed = in_row
    if HAS_CHANGED:
        other = tl.load(changed_row + offsets, mask=offsets < changed_size, other=0.0)
        value = tl.where(offsets < changed_size, other, value)
    if HAS_MASKS:
        words = tl.load(mask_row + offsets // 32, mask=offsets < masked_size, other=-1)
        is_allowed = in_row & (((words >> (offsets % 32)) & 1) != 0)
        value = tl.where(is_allowed, value, float("-inf"))
    return value / temperature, is_allowed


@triton.jit
def _adjusted_block(
    row, start, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED: tl.constexpr,
    HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(adjusted logits of the row's tokens from `start` on; which of these are in the vocabulary)"""
    offsets = start + tl.arange(0, BLOCK)
    in_row = offsets < vocab_size
    raw = tl.load(row + offsets, mask=in_row, other=float("-inf")).to(tl.float32)
    adjusted, _ = _adjusted(
        raw, offsets, in_row, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED, HAS_MASKS
    )
    return adjusted, in_row


@triton.jit
def _least_key(
    row, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature, largest, least, counts, limit,
    HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key with less above it than allowed; at most that of `largest`.

    counts: allowed are fewer than `limit` tokens; otherwise, less than the share `limit` of the mass of all tokens with
    at least the key `least`. The mass of a token is exp(adjusted - largest)."""
    low = tl.full((), -2147483649, tl.int64)  # the key below all: too much is above it
    high = _key(largest).to(tl.int64)
    target = limit
    first, second, third = low + 1, low + 1, low + 1
    for turn in range(18):  # the first finds the mass; after each other turn, a quarter of the keys remain
        first_key, second_key, third_key = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            adjusted, in_row = _adjusted_block(
                row, start, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED,
                HAS_MASKS, BLOCK,
            )  # fmt: skip
            keys = _key(adjusted)
            mass = tl.where(keys >= least, tl.exp(adjusted - largest), 0.0)
            amount = tl.where(in_row, tl.where(counts, 1.0, mass), 0.0)
            above_first += tl.where(keys > first_key, amount, 0.0)
            above_second += tl.where(keys > second_key, amount, 0.0)
            above_third += tl.where(keys > third_key, amount, 0.0)
        above_1, above_2, above_3 = tl.sum(above_first), tl.sum(above_second), tl.sum(above_third)
        if turn == 0:
            target = tl.where(counts, limit, limit * above_1)
        else:
            is_1, is_2, is_3 = above_1 < target, above_2 < target, above_3 < target
            high = tl.where(is_1, first, tl.where(is_2, second, tl.where(is_3, third, high)))
            low = tl.where(is_1, low, tl.where(is_2, first, tl.where(is_3, second, third)))
            low = tl.minimum(low, high - 1)
        step = tl.maximum((high - low) // 4, 1)
        first = tl.minimum(low + step, high)
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
    return high.to(tl.int32)


@triton.jit(do_not_specialize=["first"])
def _draw_row(
    first, logits, row_stride, vocab_size, params, params_stride, noise_keys,
    changed_index, changed_logits, mask_index, mask_bits, num_words,
    tokens, chosen, normalizers,
    HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    drawn = tl.program_id(0).to(tl.int64)
    index = first + drawn
    row = logits + index * row_stride
    own_params = params + index * params_stride
    asked = tl.load(own_params + TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(own_params + TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(own_params + TOP_K)
    min_p = tl.load(own_params + MIN_P).to(tl.float32, bitcast=True)
    is_greedy = asked == 0.0
    temperature = tl.where(is_greedy, 1.0, asked)
    first_key = tl.load(noise_keys + 2 * index).to(tl.uint32)
    second_key = tl.load(noise_keys + 2 * index + 1).to(tl.uint32)
    changed_size = 0  # the row's number of changed logits: all or none
    changed_row = changed_logits
    if HAS_CHANGED:
        which = tl.load(changed_index + index).to(tl.int64)
        changed_size = tl.where(which >= 0, vocab_size, 0)
        changed_row = changed_logits + tl.maximum(which, 0) * vocab_size
    masked_size = 0  # the row's number of tokens with a bit: all or none
    mask_row = mask_bits
    if HAS_MASKS:
        which_mask = tl.load(mask_index + index).to(tl.int64)
        masked_size = tl.where(which_mask >= 0, vocab_size, 0)
        mask_row = mask_bits + tl.maximum(which_mask, 0) * num_words

    least = tl.full((), -2147483648, tl.int32)  # smallest key inside the limits
    is_limited = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
    if is_limited & (asked > 0.0):
        largest_of = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            adjusted, _ = _adjusted_block(
                row, start, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED,
                HAS_MASKS, BLOCK,
            )  # fmt: skip
            largest_of = tl.maximum(largest_of, adjusted)
        largest = tl.max(largest_of)
        if (largest > float("-inf")) & (largest < float("inf")):
            if min_p > 0.0:
                least = _key(largest + tl.log(min_p))
            for stage in range(2):
                counts = stage == 0
                if (counts & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)):
                    bound = _least_key(
                        row, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature, largest, least,
                        counts, tl.where(counts, top_k.to(tl.float32), top_p), HAS_CHANGED, HAS_MASKS, BLOCK,
                    )  # fmt: skip
                    least = tl.maximum(least, bound)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.full((BLOCK,), 2147483647, tl.int32)
    largest_raw = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    is_finite = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        in_row = offsets < vocab_size
        raw = tl.load(row + offsets, mask=in_row, other=float("-inf")).to(tl.float32)
        is_finite = is_finite & (raw < float("inf")).to(tl.int32)
        higher = tl.maximum(largest_raw, raw)
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(largest_raw - origin) + tl.exp(raw - origin)
        largest_raw = higher
        adjusted, is_allowed = _adjusted(
            raw, offsets, in_row, changed_row, changed_size, mask_row, masked_size, temperature, HAS_CHANGED,
            HAS_MASKS,
        )  # fmt: skip
        adjusted = tl.where(_key(adjusted) >= least, adjusted, float("-inf"))
        noise = tl.where(is_greedy, 0.0, _gumbel(offsets, first_key, second_key))
        value = tl.where(in_row, adjusted + noise, float("-inf"))
        is_better = is_allowed & ((value > best) | (best_token == 2147483647))
        best_token = tl.where(is_better, offsets, best_token)
        best = tl.where(is_better, value, best)
    highest = tl.max(best)
    token = tl.min(tl.where(best == highest, best_token, 2147483647))
    largest = tl.max(largest_raw)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(sums * tl.exp(largest_raw - origin))
    token = tl.minimum(token, vocab_size - 1)  # if a NaN has won
    tl.store(normalizers + drawn, largest + tl.log(total))
    tl.store(chosen + drawn, tl.load(row + token).to(tl.float32))
    tl.store(tokens + drawn, tl.where(tl.min(is_finite) == 1, token.to(tl.int64), -1))
