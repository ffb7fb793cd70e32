"""Rows of logits in a Triton kernel: one program reads one row, block by block."""

import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.messages.generation import SamplingParams

# R rows that sample, V vocabulary, C rows with changed logits, A rows with a mask

COLUMN = {name: index for index, name in enumerate(SamplingParams._fields)}
_BLOCK = 2048


def block_size(vocab_size: int) -> int:
    """Logits that a program reads at once."""
    return int(min(_BLOCK, triton.next_power_of_2(vocab_size)))


def row_arguments(
    logits: Tensor,
    own: slice,
    device_params: Tensor,
    changed: tuple[Tensor, Tensor] | None,
    masks: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | int, ...]:
    """What `open_row` takes from a kernel's arguments, in the order of its parameters, as in triton_sample.draw."""
    assert logits.stride(1) == 1
    changed_index, changed_logits = (device_params, logits) if changed is None else changed
    mask_index, mask_bits = (device_params, device_params) if masks is None else masks
    return (
        *(own.start, logits, logits.stride(0), logits.shape[1], device_params, device_params.stride(0)),
        *(changed_index, changed_logits, mask_index, mask_bits, mask_bits.shape[1]),
    )


@triton.jit
def open_row(
    index, logits, row_stride, vocab_size, params, params_stride, changed_index, changed_logits, mask_index, mask_bits,
    num_words, TEMPERATURE: tl.constexpr, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """(pointer to the row's logits, V, pointer to its changed logits, their number: V or 0, pointer to the words of its
    mask, the number of tokens with a bit: V or 0, the temperature: 1 if it is greedy)"""
    asked = tl.load(params + index * params_stride + TEMPERATURE).to(tl.float32, bitcast=True)
    changed_size = 0
    changed_row = changed_logits
    if HAS_CHANGED:
        which = tl.load(changed_index + index).to(tl.int64)
        changed_size = tl.where(which >= 0, vocab_size, 0)
        changed_row = changed_logits + tl.maximum(which, 0) * vocab_size
    masked_size = 0
    mask_row = mask_bits
    if HAS_MASKS:
        which_mask = tl.load(mask_index + index).to(tl.int64)
        masked_size = tl.where(which_mask >= 0, vocab_size, 0)
        mask_row = mask_bits + tl.maximum(which_mask, 0) * num_words
    temperature = tl.where(asked == 0.0, 1.0, asked)
    return logits + index * row_stride, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature


@triton.jit
def load_block(row, start, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """(token ids from `start` on, their logits, these after rules and mask and divided by the temperature, whether each
    token is allowed). row: from open_row. Outside the vocabulary, both are negative infinity."""
    pointer, vocab_size, changed_row, changed_size, mask_row, masked_size, temperature = row
    token_ids = start + tl.arange(0, BLOCK)
    is_allowed = token_ids < vocab_size
    raw = tl.load(pointer + token_ids, mask=is_allowed, other=float("-inf")).to(tl.float32)
    value = raw
    if HAS_CHANGED:
        other = tl.load(changed_row + token_ids, mask=token_ids < changed_size, other=0.0)
        value = tl.where(token_ids < changed_size, other, value)
    if HAS_MASKS:
        words = tl.load(mask_row + token_ids // 32, mask=token_ids < masked_size, other=-1)
        is_allowed = is_allowed & (((words >> (token_ids % 32)) & 1) != 0)
        value = tl.where(is_allowed, value, float("-inf"))
    return token_ids, raw, value / temperature, is_allowed
