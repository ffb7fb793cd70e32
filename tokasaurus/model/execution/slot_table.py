"""The worker's state of each batch slot, updated by the changes in every ForwardInput; and the part of it that another
device than the host has a copy of, where steps send only what changes."""

# F fields of SAMPLING_DTYPE, A of the slots, B blocks, C copies

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, SlotChanges, SlotOpens, TableCopies
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.decoder.state_rows import ZEROS, Segments, segments_of
from tokasaurus.model.execution.recorded_inputs import SlotState
from tokasaurus.model.sampling.noise import sequence_keys
from tokasaurus.model.sampling.rules import SlotRules, as_words, has_limits, params_to_device
from tokasaurus.model.staging.staging import ON_HOST, Staging


@dataclass(frozen=True, slots=True)
class SlotTableSize:
    """The dimensions of a SlotTable."""

    num_slots: int
    """Including the padding slot."""

    max_blocks: int
    """Blocks of the longest sequence."""


class SlotTable:
    """State per slot, in arrays indexed by slot.

    All are on the host, except tokens (last_tokens, rules.tokens): no step waits for those to reach the host. If the
    device is not the host, on_device has copies of the arrays that forwards read there and that would be long to send.
    """

    def __init__(self, size: SlotTableSize, device: torch.device) -> None:
        slots = size.num_slots
        self.positions: NDArray[np.int32] = np.zeros(slots, np.int32)
        """Number of the slot's tokens that earlier steps have computed."""
        self.first_writes: NDArray[np.int32] = np.zeros(slots, np.int32)
        """Tokens at earlier positions already have their KV in the cache, though they may be computed again."""
        self.num_prompt_tokens: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.block_tables: NDArray[np.int32] = np.zeros((slots, size.max_blocks), np.int32)
        """int32 [slots, max_blocks], 0 after the slot's num_blocks. A table may be ahead of the position: the blocks
        of a whole prompt are added when its slot opens."""
        self.num_blocks: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.sampling: NDArray[np.void] = np.zeros(slots, SAMPLING_DTYPE)
        self.is_limited: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Whether the slot's sampling has limits, from has_limits."""
        self.noise_keys: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.want_logprobs: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.num_top_logprobs: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.logprobs_as_sampled: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Whether the slot's logprobs are of the distribution it draws from, as in SlotOpens."""
        self.want_experts: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.adapters: NDArray[np.int32] = np.zeros(slots, np.int32)
        """Number of each slot's adapter; 0: none."""
        self.state_rows: NDArray[np.int32] = np.full(slots, ZEROS, np.int32)
        """The row where the slot's states are, as of the next step, or ZEROS: see state_rows."""
        self.rules = SlotRules(slots, device)
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.on_device = None if device.type == "cpu" else DeviceSlots(slots, size.max_blocks, device)

    @property
    def num_slots(self) -> int:
        """With the padding slot."""
        return len(self.positions)

    def apply(self, changes: SlotChanges, staging: Staging = ON_HOST) -> None:
        """Close slots, open slots, append blocks, then copy the beginnings of block tables."""
        if self.on_device is not None:
            self.on_device.forget_appended()
        if len(changes.closed):
            self.block_tables[changes.closed] = 0
            self.num_blocks[changes.closed] = 0
            self.rules.close(changes.closed)
        if changes.opened is not None:
            self._open(changes.opened)
            if self.on_device is not None:
                self.on_device.open(changes.opened, staging)
        copies = changes.copies
        if copies is not None:
            self.num_blocks[copies.slots] = copies.num_blocks
        slots = changes.block_slots
        if len(slots):
            # No kv index may be below 0, not even of padding (block 0): plain torch would write from the end.
            assert (changes.block_ids >= 0).all(), "blocks have numbers from 0 on"
            # A slot may get several blocks at once: the i-th of them is appended i entries later.
            order = np.argsort(slots, kind="stable")
            ordered = slots[order]
            first = np.searchsorted(ordered, ordered, side="left")
            rank = np.arange(len(ordered)) - first
            columns, ids = self.num_blocks[ordered] + rank, changes.block_ids[order]
            self.block_tables[ordered, columns] = ids
            if self.on_device is not None:
                self.on_device.append(ordered, columns, ids, staging)
            np.add.at(self.num_blocks, slots, 1)
        if copies is not None:
            for slot, source, num_blocks in zip(copies.slots, copies.source_slots, copies.num_blocks, strict=True):
                self.block_tables[slot, :num_blocks] = self.block_tables[source, :num_blocks]
            if self.on_device is not None:
                self.on_device.copy(copies, staging)

    def first_blocks(self, slots: NDArray[np.int32], num_blocks: int, staging: Staging) -> Tensor:
        """The first num_blocks blocks of the tables of slots [A]: int32 [A, num_blocks], contiguous, on the device once
        staged work is launched."""
        if self.on_device is not None:
            return self.on_device.tables(slots, num_blocks, staging)
        return staging.to_device(np.ascontiguousarray(self.block_tables[slots, :num_blocks]))

    def device_params(self, params: NDArray[np.void], slots: Tensor, staging: Staging) -> Tensor:
        """Sampling parameters of A slots on the device, int32 [A, F], once staged work is launched.

        params: SAMPLING_DTYPE [A], of the slots. slots: int64 [A], staged.
        """
        if self.on_device is not None:
            return self.on_device.sampling(slots, staging)
        return params_to_device(params, slots.device)

    def take_segments(self, step: ForwardInput) -> Segments:
        """Of the layers' states in a step, whose changes are applied. Its slots have their states after it."""
        segments = segments_of(step, self.state_rows[step.slots], len(self.state_rows))
        self.state_rows[step.slots] = step.slots
        return segments

    def state(self) -> SlotState:
        """What the steps' kernels read of all slots, where forwards run."""
        if self.on_device is None:
            params, tables = torch.from_numpy(as_words(self.sampling)), torch.from_numpy(self.block_tables)
        else:
            params, tables = self.on_device.params, self.on_device.block_tables
        return SlotState(self.last_tokens, self.rules.tokens, params, tables)

    def _open(self, opened: SlotOpens) -> None:
        slots = opened.slots
        self.positions[slots] = opened.first_positions
        self.first_writes[slots] = opened.first_positions if opened.first_writes is None else opened.first_writes
        self.num_prompt_tokens[slots] = opened.num_prompt_tokens
        self.sampling[slots] = opened.sampling
        self.is_limited[slots] = has_limits(opened.sampling)
        self.noise_keys[slots] = sequence_keys(opened.seeds, opened.sample_indices)
        self.want_logprobs[slots] = opened.want_logprobs
        self.num_top_logprobs[slots] = 0 if opened.num_top_logprobs is None else opened.num_top_logprobs
        self.logprobs_as_sampled[slots] = False if opened.logprobs_as_sampled is None else opened.logprobs_as_sampled
        self.want_experts[slots] = False if opened.want_experts is None else opened.want_experts
        self.adapters[slots] = 0 if opened.adapters is None else opened.adapters
        self.state_rows[slots] = ZEROS
        if opened.snapshots is not None:
            rows = len(self.state_rows) - 1 + opened.snapshots
            self.state_rows[slots] = np.where(opened.snapshots > 0, rows, np.int32(ZEROS))
        self.rules.open(slots, opened.rules, self.sampling)


@dataclass(slots=True)
class _Appended:
    """Blocks of a step: ids[i] is at columns[i] of the table of slots[i]."""

    slots: NDArray[np.int32]
    columns: NDArray[np.int64]
    ids: NDArray[np.int32]
    is_taken: bool = False
    """Whether something else stores them on the device."""


class DeviceSlots:
    """Block tables and sampling parameters of all slots on a device other than the host.

    Rows of slots that are closed keep their contents until the slot is opened again.

    Entries beyond num_blocks are stale but valid block ids.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        # int32 [slots, max_blocks]
        self.block_tables = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        self._appended: _Appended | None = None
        """Blocks of this step that are not stored yet."""
        # int32 [slots, F], the words of SAMPLING_DTYPE
        self.params = torch.zeros((num_slots, len(SamplingParams._fields)), dtype=torch.int32, device=device)

    def open(self, opened: SlotOpens, staging: Staging) -> None:
        slots, words = staging.to_device(opened.slots), staging.to_device(as_words(opened.sampling))
        staging.then(lambda: self.params.index_copy_(0, slots.long(), words))

    def append(
        self, slots: NDArray[np.int32], columns: NDArray[np.int64], ids: NDArray[np.int32], staging: Staging
    ) -> None:
        """Put blocks into tables: ids[i] at columns[i] of the table of slots[i]; all [B]."""
        entries = staging.to_device(slots.astype(np.int64) * self.block_tables.shape[1] + columns)
        blocks = staging.to_device(ids)
        self._appended = appended = _Appended(slots, columns, ids)

        def store() -> None:
            if not appended.is_taken:
                self.block_tables.view(-1).index_copy_(0, entries, blocks)

        staging.then(store)

    def forget_appended(self) -> None:
        """Later calls of take_appended find nothing; what was appended before is stored."""
        self._appended = None

    def take_appended(self, row_slots: NDArray[np.int32], columns: NDArray[np.int32]) -> NDArray[np.int32]:
        """The blocks that were appended in this step: int32 [S], -1 for rows without; the caller stores them. All -1
        if a slot has got one that is not the last of its row, or none of the rows: then they are stored here.

        row_slots: int32 [S]; rows of padding share slot 0. columns: int32 [S], of each row's last block."""
        blocks, appended = np.full(len(row_slots), -1, np.int32), self._appended
        if appended is None:
            return blocks
        row_of_slot = np.full(len(self.block_tables), -1)
        row_of_slot[row_slots] = np.arange(len(row_slots))
        rows = row_of_slot[appended.slots]
        if (rows >= 0).all() and np.array_equal(appended.columns, columns[rows]):
            # No slot comes twice: its blocks would have different columns.
            blocks[rows] = appended.ids
            appended.is_taken = True
        return blocks

    def copy(self, copies: TableCopies, staging: Staging) -> None:
        """Copy the beginnings of tables, in order; many copies from one table, or from copies of it, at once."""
        self.forget_appended()  # the copies may have them
        for arrays in copy_rounds(copies):
            targets, sources, counts = map(staging.to_device, arrays)
            staging.then(partial(self._copy, targets, sources, counts, int(arrays[2].max())))

    def tables(self, slots: NDArray[np.int32], num_blocks: int, staging: Staging) -> Tensor:
        """The first num_blocks blocks of A slots' tables: int32 [A, num_blocks], once staged work is launched."""
        chosen = staging.to_device(slots.astype(np.int64))
        out = torch.empty((len(slots), num_blocks), dtype=torch.int32, device=self.block_tables.device)
        staging.then(lambda: torch.index_select(self.block_tables[:, :num_blocks], 0, chosen, out=out))
        return out

    def sampling(self, slots: Tensor, staging: Staging) -> Tensor:
        """slots: int64 [A], staged -> int32 [A, F], once staged work is launched."""
        out = torch.empty((len(slots), self.params.shape[1]), dtype=torch.int32, device=slots.device)
        staging.then(lambda: torch.index_select(self.params, 0, slots, out=out))
        return out

    def _copy(self, targets: Tensor, sources: Tensor, counts: Tensor, longest: int) -> None:
        """targets, sources and counts: int64 [C]. longest: the largest count."""
        tables = self.block_tables[:, :longest]
        is_copied = torch.arange(longest, device=counts.device) < counts.unsqueeze(1)
        tables.index_copy_(0, targets, torch.where(is_copied, tables[sources], tables[targets]))


def copy_rounds(copies: TableCopies) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Targets, source slots and numbers of blocks of copies that may run at once, round after round; int64 [C] each.

    The samples of a request often copy one from another. Each is copied from the first instead, which needs one round.
    A copy waits for a later round only if it takes blocks that its source did not copy, but has itself.
    """
    origins: dict[int, tuple[int, int]] = {}  # of each target: its source, and the number of blocks
    round_of: dict[int, int] = {}
    rounds: list[list[tuple[int, int, int]]] = []
    for target, source, count in zip(
        copies.slots.tolist(), copies.source_slots.tolist(), copies.num_blocks.tolist(), strict=True
    ):
        while source in origins and origins[source][1] >= count:
            source = origins[source][0]
        index = round_of.get(source, -1) + 1
        origins[target], round_of[target] = (source, count), index
        if index == len(rounds):
            rounds.append([])
        rounds[index].append((target, source, count))
    return [tuple(np.array(chosen, np.int64).T) for chosen in rounds]
