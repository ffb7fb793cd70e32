"""The first three of rules.RULES in Triton kernels: copies of rows changed by penalties and biases, and how a program
reads one row, with its mask and its temperature.

Penalties and biases take three kernels. `change_logits` in rules.py is their readable reference. A row's context may
have any length and name any tokens, so its tokens are counted in an array with a word for each token of the vocabulary:
bit 0 says that the prompt has the token, the bits above it count how often it was generated. This array and the copies
bound the rows of one call; see `ruled_rows_at_once`. Other kernels read a row block by block: `open_row`, `load_block`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.buffer_sizes import ruled_rows_at_once
from tokasaurus.model.sampling.rules import RuledRows

# R rows that sample, A rows with a rule or a mask, C rows with changed logits, V vocabulary

COLUMN = {name: index for index, name in enumerate(SamplingParams._fields)}
"""Each field's place among a row's parameters."""

_BLOCK = 2048
"""Most logits that a program reads or changes at once."""

_CONTEXT_BLOCK = 1024
_BIAS_BLOCK = 128


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
    index, logits, row_stride, vocab_size, row_params, params_stride, changed_index, changed_logits, mask_index,
    mask_bits, num_words, TEMPERATURE: tl.constexpr, HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """(pointer to the row's logits, V, pointer to its changed logits, their number: V or 0, pointer to the words of its
    mask, the number of tokens with a bit: V or 0, the temperature: 1 if it is greedy)"""
    asked = tl.load(row_params + index * params_stride + TEMPERATURE).to(tl.float32, bitcast=True)
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


def changed_rows(logits: Tensor, rules: RuledRows, own: slice, device_params: Tensor) -> Tensor:
    """The logits of some rows after their biases and penalties, float32 [C, V].

    logits: [R, V], of any float dtype; they stay as they are. own: which C of the A rows, at most ruled_rows_at_once.
    device_params: int32 [R, F], from params_to_device. Several biases of one token are summed before they are added.
    """
    num_rows, vocab_size = own.stop - own.start, logits.shape[1]
    assert num_rows <= ruled_rows_at_once(vocab_size)
    assert logits.stride(1) == 1
    scratch = torch.zeros((2, num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    changed, counts = scratch[0], scratch[1].view(torch.int32)
    if rules.block_tables.shape[1]:
        _count_tokens[(num_rows, triton.cdiv(rules.block_tables.shape[1] * rules.page_size, _CONTEXT_BLOCK))](
            *(own.start, counts, vocab_size, rules.tokens, rules.block_tables, rules.block_tables.stride(0)),
            *(rules.lengths, rules.num_request_tokens, rules.page_size),
            BLOCK=_CONTEXT_BLOCK,
        )
    starts = rules.bias_starts[own.start : own.stop + 1]
    max_biases = int((starts[1:] - starts[:-1]).max())
    if max_biases:
        _add_biases[(num_rows, triton.cdiv(max_biases, _BIAS_BLOCK))](
            *(own.start, changed, vocab_size, rules.device_bias_starts, rules.bias_ids, rules.bias_values),
            BLOCK=_BIAS_BLOCK,
        )
    _change_rows[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        *(own.start, logits, logits.stride(0), vocab_size, rules.rows.on_device),
        *(device_params, device_params.stride(0), counts, changed),
        PRESENCE=COLUMN["presence_penalty"],
        FREQUENCY=COLUMN["frequency_penalty"],
        REPETITION=COLUMN["repetition_penalty"],
        BLOCK=_BLOCK,
    )
    return changed


# `first`: the first of the A rows that a call is for. Kernels get whole tensors and not parts of them, whose addresses
# would be aligned by chance: another alignment is another variant to compile.


@triton.jit(do_not_specialize=["first", "table_stride"])
def _count_tokens(
    first, counts, vocab_size, tokens, tables, table_stride, lengths, num_request_tokens, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row and BLOCK positions of its context. counts: zero before."""
    index = tl.program_id(0).to(tl.int64)
    ruled = first + index
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = positions < tl.load(lengths + ruled)
    is_generated = is_there & (positions >= tl.load(num_request_tokens + ruled))
    is_prompt = is_there & (positions < tl.load(num_request_tokens + ruled))
    blocks = tl.load(tables + ruled * table_stride + positions // page_size, mask=is_there, other=0).to(tl.int64)
    token_ids = tl.load(tokens + blocks * page_size + positions % page_size, mask=is_there, other=0)
    words = counts + index * vocab_size + token_ids
    ones = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_or(words, ones, mask=is_prompt, sem="relaxed")
    tl.atomic_add(words, ones + ones, mask=is_generated, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _add_biases(first, changed, vocab_size, starts, bias_ids, bias_values, BLOCK: tl.constexpr):
    """One program for each row and BLOCK of its biases. changed: zero before, the sum of each token's biases after."""
    index = tl.program_id(0).to(tl.int64)
    ruled = first + index
    offsets = tl.load(starts + ruled) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = offsets < tl.load(starts + ruled + 1)
    token_ids = tl.load(bias_ids + offsets, mask=is_own, other=0)
    values = tl.load(bias_values + offsets, mask=is_own, other=0.0)
    tl.atomic_add(changed + index * vocab_size + token_ids, values, mask=is_own, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _change_rows(
    first, logits, row_stride, vocab_size, rows, row_params, params_stride, counts, changed,
    PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, REPETITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row and BLOCK tokens. changed: biases before, changed logits after."""
    index = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = offsets < vocab_size
    row = tl.load(rows + first + index)
    own_params = row_params + row * params_stride
    presence = tl.load(own_params + PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(own_params + FREQUENCY).to(tl.float32, bitcast=True)
    repetition = tl.load(own_params + REPETITION).to(tl.float32, bitcast=True)
    value = tl.load(logits + row * row_stride + offsets, mask=in_row, other=0.0).to(tl.float32)
    value += tl.load(changed + index * vocab_size + offsets, mask=in_row, other=0.0)
    word = tl.load(counts + index * vocab_size + offsets, mask=in_row, other=0)
    repeated = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(word != 0, repeated, value)
    num_generated = word >> 1
    value -= frequency * num_generated.to(tl.float32)
    value -= tl.where(num_generated > 0, presence, 0.0)
    tl.store(changed + index * vocab_size + offsets, value, mask=in_row)
