"""Decode steps in one call of the CPU kernels (csrc/step), without torch.

It knows nothing of prompts, prefix groups, rules, masks and logprobs: a step with any of these takes the runner's usual
way, which gives the same results.
"""

# R rows of a decode step, each of one token

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, SlotChanges
from tokasaurus.model.cpu.bindings import ELEMENT_CODES, DecodeStepStruct, Kernels, PagedPartStruct
from tokasaurus.model.cpu.layer_executor import PackedWeights
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.executors import KernelExecutor
from tokasaurus.model.execution.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decode step has computed, of its R rows in order."""

    tokens: NDArray[np.int64]
    """int64 [R], those sampled; -1 for a row that is not finite."""
    positions: NDArray[np.int64]
    """int64 [R], of the tokens whose keys and values the step has stored."""
    blocks: NDArray[np.int32]
    """int32 [R], the block of each position."""


@dataclass(slots=True)
class _Rows:
    """Made once for all steps in a row that have the same slots in the same order."""

    slots: NDArray[np.int32]
    kv_indices: Tensor
    kv_lengths: Tensor
    sampled: Tensor
    part: PagedPartStruct
    step: DecodeStepStruct
    pointed_at: tuple[object, ...]
    """Keeps the memory alive to which the structs have only addresses."""
    table: NDArray[np.int32] | None = None
    """int32 [R, blocks]; None if the slots have got blocks since it was copied."""


class KernelDecode:
    """Computes the decode steps of a whole model on one rank."""

    def __init__(
        self, model: Decoder, executor: KernelExecutor, slots: SlotTable, page_size: int, kernels: Kernels
    ) -> None:
        self._model = model
        self._executor = executor
        self._slots = slots
        self._page_size = page_size
        self._kernels = kernels
        self._rows: _Rows | None = None

    @classmethod
    def of(
        cls, model: Decoder, executor: KernelExecutor, slots: SlotTable, page_size: int, kernels: Kernels
    ) -> "KernelDecode | None":
        """None if every decode step needs more than the kernels, whatever its number of rows."""
        head, embedding = model.head, model.embedding
        if head is None or head.packed is None or embedding is None:
            return None
        if embedding.packed is None and embedding.weight.dtype != model.weight_dtype:
            return None
        return cls(model, executor, slots, page_size, kernels)

    def note(self, changes: SlotChanges) -> None:
        """Must be called with the changes of every step, of whatever kind it is."""
        if changes.opened is not None or len(changes.closed) or changes.copies is not None:
            self._rows = None
        elif self._rows is not None and len(changes.block_slots):
            self._rows.table = None

    def forget(self) -> None:
        """Steps have run whose changes were not noted."""
        self._rows = None

    def run(self, step: ForwardInput) -> Decoded | None:
        """Compute a step whose changes are applied and noted, if it is of this kind, and store its tokens as their
        slots' last ones. None, and nothing is done, if it is not."""
        if not 0 < len(step.slots) == step.num_decode or step.groups is not None or step.masks is not None:
            return None
        rows = self._rows
        if rows is None or not np.array_equal(rows.slots, step.slots):
            if not self._computes(step.slots):
                return None
            rows = self._rows = self._take(step.slots)
        if rows.table is None:
            # The warm-up's slots own no block; all entries of their tables are the padding block.
            num_columns = int(self._slots.num_blocks[rows.slots].max()) or self._slots.block_tables.shape[1]
            rows.table = np.ascontiguousarray(self._slots.block_tables[rows.slots, :num_columns])
            rows.part.block_table, rows.part.table_stride = rows.table.ctypes.data, num_columns
        states = self._model.states
        if states is not None:
            states.segments = self._slots.take_segments(step)
            segments = states.place_in(self._executor.layers)  # lives until the step is computed
            rows.step.segments = ctypes.addressof(segments)
        self._kernels.decode_step(rows.step)
        blocks = rows.kv_indices.numpy() // self._page_size
        positions = rows.kv_lengths.numpy().astype(np.int64) - 1
        return Decoded(rows.sampled.numpy().copy(), positions, blocks.astype(np.int32))

    def _computes(self, slots: NDArray[np.int32]) -> bool:
        head = self._model.head
        assert head is not None
        return (
            self._executor.runs_on_kernels(len(slots))
            and head.runs_on_kernels(len(slots))
            and not self._slots.want_logprobs[slots].any()
            and not self._slots.rules.have_any(slots)
            and not self._have_own_vocab(slots)
        )

    def _have_own_vocab(self, slots: NDArray[np.int32]) -> bool:
        """Whether an adapter of these slots changes embeddings or logits."""
        rows = self._model.row_adapters
        return rows is not None and not rows.outside_layers.isdisjoint(self._slots.adapters[slots].tolist())

    def _take(self, row_slots: NDArray[np.int32]) -> _Rows:
        model, slots, num_rows = self._model, self._slots, len(row_slots)
        head, embedding, norm, layers = model.head, model.embedding, model.final_norm, self._executor.layers.structs
        assert head is not None
        assert embedding is not None
        assert norm is not None
        is_past_prompt = slots.positions[row_slots] >= slots.num_prompt_tokens[row_slots]
        assert is_past_prompt.all(), "a decode row is past its prompt, so that it samples and writes its keys"
        token_ids, kv_indices, sampled = (torch.empty(num_rows, dtype=torch.int64) for _ in range(3))
        noise_keys = torch.empty((num_rows, 2), dtype=torch.int64)
        kv_lengths = torch.empty(num_rows, dtype=torch.int32)
        query_starts = torch.arange(num_rows + 1, dtype=torch.int32)
        spec, cos_sin_of_position = model.spec, model.rotary.cos_sin
        cos_sin = torch.empty((num_rows, cos_sin_of_position.shape[1]), dtype=torch.float32)
        hidden = model.new_hidden(num_rows, torch.device("cpu"))
        logits = head.logits_memory(num_rows)
        params = slots.sampling.take(row_slots)
        parts = (PagedPartStruct * 1)()
        parts[0] = PagedPartStruct(
            *(0, num_rows, num_rows, query_starts.data_ptr(), None, 0, kv_lengths.data_ptr(), True, False)
        )
        forward = self._executor.backend.paged_forward(kv_indices.data_ptr(), parts)
        row_slots = row_slots.copy()
        adapters = slots.adapters[row_slots]
        step = DecodeStepStruct(
            *(ELEMENT_CODES[model.activation_dtype], len(layers), model.head_dim, spec.num_rotary_tables),
            ctypes.addressof(layers),
            *(_address(embedding.packed_whole), _address(head.packed_whole)),
            None if embedding.packed_whole is not None else embedding.weight.data_ptr(),
            *(model.embedding_scale, norm.packed.struct, spec.logit_scale, spec.logit_softcap or 0),
            cos_sin_of_position.data_ptr(),
            *(slots.positions.ctypes.data, slots.block_tables.ctypes.data, slots.block_tables.shape[1]),
            *(slots.last_tokens.data_ptr(), slots.rules.tokens.data_ptr(), slots.noise_keys.ctypes.data),
            *(num_rows, row_slots.ctypes.data, adapters.ctypes.data if adapters.any() else None),
            *(None, params.ctypes.data, ctypes.addressof(forward)),
            *(token_ids.data_ptr(), kv_indices.data_ptr(), noise_keys.data_ptr(), kv_lengths.data_ptr()),
            *(cos_sin.data_ptr(), hidden.data_ptr(), logits.data_ptr(), sampled.data_ptr()),
        )
        pointed_at = token_ids, noise_keys, query_starts, cos_sin, hidden, logits, adapters, params, parts, forward
        return _Rows(row_slots, kv_indices, kv_lengths, sampled, parts[0], step, pointed_at)


def _address(weights: PackedWeights | None) -> int | None:
    return None if weights is None else ctypes.addressof(weights.struct)
