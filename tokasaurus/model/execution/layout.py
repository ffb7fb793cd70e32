"""Build a forward's layout: which tokens its rows attend to, and in which blocks these are."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.attention.backend import BlockLists, PagedLayout, PagedPart
from tokasaurus.model.attention.block_lists import fill_lists
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.staging.staging import Staging

# S rows of the batch (one per running slot), A rows of one part


class LayoutBuilder:
    """Builds the parts of one forward.

    starts: int32 [S + 1], the first token of each row among the forward's tokens, and the end of the last.
    kv_lengths: int32 [S], tokens of each row's context, including the forward's.
    """

    def __init__(
        self,
        step: ForwardInput,
        slots: SlotTable,
        starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        page_size: int,
        staging: Staging,
    ) -> None:
        self._step = step
        self._slots = slots
        self._starts = starts
        self._kv_lengths = kv_lengths
        self._page_size = page_size
        self._staging = staging

    def build(self, kv_indices: Tensor) -> PagedLayout:
        """Parts, each omitted if empty: grouped decode rows over the tokens after their prefix; the other decode rows;
        the prefill rows. kv_indices: as in PagedLayout."""
        step, starts = self._step, self._starts
        num_grouped, prefix = 0, None
        skipped = np.zeros(len(step.slots), np.int32)  # blocks of each row that the prefix part covers
        if step.groups is not None:
            num_grouped = int(step.groups.sizes.sum())
            skipped[:num_grouped] = np.repeat(step.groups.num_blocks, step.groups.sizes)
            prefix = self._prefix_part()
        parts = []
        for begin, end in ((0, num_grouped), (num_grouped, step.num_decode), (step.num_decode, len(step.slots))):
            if begin == end:
                continue
            is_partial = end == num_grouped
            parts.append(
                self._part(
                    first_row=int(starts[begin]),
                    row_slots=step.slots[begin:end],
                    first_blocks=skipped[begin:end] if is_partial else None,
                    query_starts=starts[begin : end + 1] - starts[begin],
                    kv_lengths=self._kv_lengths[begin:end] - skipped[begin:end] * np.int32(self._page_size),
                    causal=True,
                    is_partial=is_partial,
                )
            )
        return PagedLayout(kv_indices, tuple(parts), prefix, self._staging)

    def _prefix_part(self) -> PagedPart:
        """One segment per group; its blocks are the first blocks in the table of the group's first row."""
        groups = self._step.groups
        assert groups is not None
        query_starts = np.zeros(len(groups.sizes) + 1, np.int32)
        np.cumsum(groups.sizes, out=query_starts[1:])
        return self._part(
            first_row=0,
            row_slots=self._step.slots[query_starts[:-1]],
            first_blocks=None,
            query_starts=query_starts,
            kv_lengths=groups.num_blocks * np.int32(self._page_size),
            causal=False,
            is_partial=True,
        )

    def _part(
        self,
        first_row: int,
        row_slots: NDArray[np.int32],
        first_blocks: NDArray[np.int32] | None,
        query_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        causal: bool,
        is_partial: bool,
    ) -> PagedPart:
        """row_slots, first_blocks and kv_lengths: int32 [A]; the segments' blocks begin at first_blocks of the slots'
        tables, or at 0 if this is None. query_starts: int32 [A + 1]."""
        on_device = self._slots.on_device is not None
        return PagedPart(
            first_row=first_row,
            num_rows=int(query_starts[-1]),
            query_starts=torch.from_numpy(query_starts),
            block_table=None if on_device else self._host_table(row_slots, first_blocks, int(kv_lengths.max())),
            kv_lengths=torch.from_numpy(kv_lengths),
            causal=causal,
            is_partial=is_partial,
            lists=self._block_lists(row_slots, first_blocks, query_starts, kv_lengths) if on_device else None,
        )

    def _host_table(self, row_slots: NDArray[np.int32], first_blocks: NDArray[np.int32] | None, longest: int) -> Tensor:
        """int32 [A, blocks of the longest context]."""
        tables = self._slots.block_tables
        num_columns = -(-longest // self._page_size)
        if first_blocks is None:
            return torch.from_numpy(tables[row_slots, :num_columns])
        columns = first_blocks[:, None] + np.arange(num_columns)
        np.minimum(columns, tables.shape[1] - 1, out=columns)
        return torch.from_numpy(tables[row_slots[:, None], columns])

    def _block_lists(
        self,
        row_slots: NDArray[np.int32],
        first_blocks: NDArray[np.int32] | None,
        query_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
    ) -> BlockLists:
        assert self._slots.on_device is not None
        tables, to_device = self._slots.on_device.block_tables, self._staging.to_device
        counts = -(-kv_lengths // np.int32(self._page_size))
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        first_entries = row_slots.astype(np.int64) * tables.shape[1]
        if first_blocks is not None:
            first_entries += first_blocks
        lists = BlockLists(
            host_starts=torch.from_numpy(starts),
            starts=torch.empty(len(starts), dtype=torch.int32, device=tables.device),
            blocks=torch.empty(int(starts[-1]), dtype=torch.int32, device=tables.device),
            last_lengths=torch.empty(len(counts), dtype=torch.int32, device=tables.device),
            query_starts=to_device(query_starts),
            kv_lengths=to_device(kv_lengths),
        )
        self._staging.then(partial(fill_lists, tables, to_device(first_entries), self._page_size, lists))
        return lists
