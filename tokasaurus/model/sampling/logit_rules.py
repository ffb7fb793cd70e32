"""Logit biases and penalties: store them per slot and apply them to rows of logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import LogitRules
from tokasaurus.model.sampling.chosen_rows import ChosenRows, choose_rows
from tokasaurus.model.sampling.params import ParamColumns
from tokasaurus.model.staging.staging import Staging

# R rows that sample, V vocabulary

_SCRATCH_BYTES = 128 << 20
_SCRATCH_BYTES_PER_TOKEN = 8
"""A word to count in, and a changed logit, for each token of the vocabulary."""


def ruled_rows_at_once(vocab_size: int) -> int:
    """Rows with rules whose logits a GPU changes at once, which bounds the memory: 130 for Llama 3's vocabulary."""
    return max(1, _SCRATCH_BYTES // (_SCRATCH_BYTES_PER_TOKEN * vocab_size))


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The A of the R rows that sample whose logits are changed before sampling. See LogitRules."""

    rows: ChosenRows

    tokens: Tensor
    """int32 [kv indices], the token at each kv index; see SlotRules.tokens."""

    page_size: int
    """Tokens per block."""

    block_tables: Tensor
    """int32 [A, blocks]."""

    lengths: Tensor
    """int32 [A], number of context tokens to which a row's penalties apply; 0 for a row without penalties."""

    num_request_tokens: Tensor
    """int32 [A]."""

    bias_starts: NDArray[np.int64]
    """int64 [A + 1], where each row's biases start in bias_ids and bias_values; on the host."""

    device_bias_starts: Tensor
    """int64 [A + 1], the same."""

    bias_ids: Tensor
    """int32 [biases], token ids."""

    bias_values: Tensor
    """float32 [biases]."""

    def cut(self, first_row: int, num_rows: int) -> "RuledRows | None":
        """The rules of num_rows rows from `first_row` on, with all rows' biases; None if no such row has rules."""
        own = self.rows.within(first_row, num_rows)
        if own.start == own.stop:
            return None
        ends = slice(own.start, own.stop + 1)
        # In memory of their own: Triton compiles a kernel again for an address that is aligned otherwise.
        return replace(
            self,
            rows=self.rows.cut(first_row, num_rows),
            block_tables=self.block_tables[own].clone(),
            lengths=self.lengths[own].clone(),
            num_request_tokens=self.num_request_tokens[own].clone(),
            bias_starts=self.bias_starts[ends],
            device_bias_starts=self.device_bias_starts[ends].clone(),
        )


class SlotRules:
    """The rules of each slot, and the token at each kv index, from which penalties find the tokens of a context.

    This covers tokens of a prefix that other sequences have computed, and tokens generated before a preemption.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._has_penalties = np.zeros(num_slots, np.bool_)
        self._num_request_tokens = np.zeros(num_slots, np.int32)
        self._last_bias_ends = np.zeros(num_slots, np.int32)
        self._biases: dict[int, tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]] = {}
        self.allocate(0)

    def allocate(self, num_kv_indices: int) -> None:
        """Allocate `tokens` for a KV cache of num_kv_indices tokens, including the padding block."""
        # int32 [num_kv_indices], the token at each kv index, on the device
        self.tokens = torch.zeros(num_kv_indices, dtype=torch.int32, device=self._device)

    def close(self, slots: NDArray[np.int32]) -> None:
        if self._biases:
            for slot in slots.tolist():
                self._biases.pop(slot, None)

    def open(self, slots: NDArray[np.int32], rules: LogitRules | None, sampling: NDArray[np.void]) -> None:
        """rules: for some of the slots; the others have none. sampling: SAMPLING_DTYPE [slots], of all slots."""
        self._has_penalties[slots] = False
        self._last_bias_ends[slots] = 0
        if rules is None:
            return
        slots = rules.slots
        self._num_request_tokens[slots] = rules.num_request_tokens
        params = sampling.take(slots)
        self._has_penalties[slots] = (
            (params["presence_penalty"] != 0) | (params["frequency_penalty"] != 0) | (params["repetition_penalty"] != 1)
        )
        ends = np.cumsum(rules.bias_counts)
        for slot, count, end in zip(slots.tolist(), rules.bias_counts.tolist(), ends.tolist(), strict=True):
            own = slice(end - count, end)
            if count:
                self._biases[slot] = rules.bias_ids[own], rules.bias_values[own], rules.bias_ends[own]
                self._last_bias_ends[slot] = rules.bias_ends[own].max()

    def select(
        self,
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        tables_of: Callable[[NDArray[np.int32], int], Tensor],
        page_size: int,
        staging: Staging,
    ) -> RuledRows | None:
        """The rows whose rules apply in this step; None if there are none.

        slots: int32 [R], of the rows that sample. num_tokens: int32 [R], tokens that their sequences have so far.
        tables_of: maps slots, int32 [A], and a number of blocks to the first blocks of their tables, int32 [A, blocks]
        on the device.
        """
        rows = np.flatnonzero(self._has_penalties[slots] | (num_tokens < self._last_bias_ends[slots]))
        if not len(rows):
            return None
        slots, num_tokens = slots[rows], num_tokens[rows]
        lengths = np.where(self._has_penalties[slots], num_tokens, 0).astype(np.int32)
        biases = [
            (ids[num < ends], values[num < ends])
            for num, (ids, values, ends) in zip(
                num_tokens.tolist(), (self._biases.get(slot, _NO_BIAS) for slot in slots.tolist()), strict=True
            )
        ]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(ids) for ids, _ in biases], out=starts[1:])
        return RuledRows(
            rows=choose_rows(rows, staging),
            tokens=self.tokens,
            page_size=page_size,
            block_tables=tables_of(slots, -(-int(lengths.max()) // page_size)),
            lengths=staging.to_device(lengths),
            num_request_tokens=staging.to_device(self._num_request_tokens[slots]),
            bias_starts=starts,
            device_bias_starts=staging.to_device(starts),
            bias_ids=staging.to_device(np.concatenate([ids for ids, _ in biases])),
            bias_values=staging.to_device(np.concatenate([values for _, values in biases])),
        )


_NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)


def change_logits(logits: Tensor, rules: RuledRows, params: ParamColumns, first_row: int) -> None:
    """Apply the rules to logits, float32 [r, V], in place: these are the rows of a step from `first_row` on.

    params: [r], of the same rows.
    """
    own = rules.rows.within(first_row, len(logits))
    if own.start == own.stop:
        return
    device = logits.device
    rows = rules.rows.on_device[own] - first_row
    changed = logits[rows]
    first_bias, last_bias = int(rules.bias_starts[own.start]), int(rules.bias_starts[own.stop])
    some = slice(first_bias, last_bias)
    counts = rules.device_bias_starts[own.start : own.stop + 1].diff()
    biased = torch.repeat_interleave(counts, output_size=last_bias - first_bias)
    changed.index_put_((biased, rules.bias_ids[some].long()), rules.bias_values[some], accumulate=True)

    kv_indices = rules.block_tables[own].long().unsqueeze(2) * rules.page_size + torch.arange(
        rules.page_size, device=device
    )
    tokens = rules.tokens[kv_indices.flatten(1)].long()
    positions = torch.arange(tokens.shape[1], device=device)
    is_there = positions < rules.lengths[own].unsqueeze(1)
    is_generated = is_there & (positions >= rules.num_request_tokens[own].unsqueeze(1))
    counts = torch.zeros_like(changed).scatter_add_(1, tokens, is_generated.float())
    is_seen = torch.zeros_like(changed).scatter_add_(1, tokens, is_there.float()) > 0
    presence, frequency, repetition = (
        params[name][rows].unsqueeze(1) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    )
    changed = torch.where(is_seen, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
    logits[rows] = changed - frequency * counts - presence * (counts > 0)
