"""Block tables and sampling parameters of all slots on a device other than the host; steps send only what changes."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import SlotOpens, TableCopies
from tokasaurus.messages.generation import SamplingParams
from tokasaurus.model.sampling.rules import as_words
from tokasaurus.model.staging.staging import Staging

# F fields of SAMPLING_DTYPE, A of the slots, B blocks, C copies


class DeviceSlots:
    """Rows of slots that are closed keep their contents until the slot is opened again.

    A block table is defined as far as the host's: entries after the slot's num_blocks are ids of some blocks.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        # int32 [slots, max_blocks]
        self.block_tables = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        # int32 [slots, F], the words of SAMPLING_DTYPE
        self._sampling = torch.zeros((num_slots, len(SamplingParams._fields)), dtype=torch.int32, device=device)

    def open(self, opened: SlotOpens, staging: Staging) -> None:
        slots, words = staging.to_device(opened.slots), staging.to_device(as_words(opened.sampling))
        staging.then(lambda: self._sampling.index_copy_(0, slots.long(), words))

    def append(
        self, slots: NDArray[np.int32], columns: NDArray[np.int64], ids: NDArray[np.int32], staging: Staging
    ) -> None:
        """Put blocks into tables: ids[i] at columns[i] of the table of slots[i]; all [B]."""
        entries = staging.to_device(slots.astype(np.int64) * self.block_tables.shape[1] + columns)
        blocks = staging.to_device(ids)
        staging.then(lambda: self.block_tables.view(-1).index_copy_(0, entries, blocks))

    def copy(self, copies: TableCopies, staging: Staging) -> None:
        """Copy the beginnings of tables, in order; many copies from one table, or from copies of it, at once."""
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
        out = torch.empty((len(slots), self._sampling.shape[1]), dtype=torch.int32, device=slots.device)
        staging.then(lambda: torch.index_select(self._sampling, 0, slots, out=out))
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
