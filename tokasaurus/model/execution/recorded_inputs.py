"""What recorded steps read, in memory that stays where it is. One launch fills all of it for a decode step, from the
step's staged arrays and the state of its slots."""

# S rows of a recorded decode step, padding included, T tokens of any recorded step, F sampling parameters of a row

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.attention.backend import BlockLists, RecordedMemory
from tokasaurus.model.attention.block_lists import fill_lists_by_torch


class StagedRows(NamedTuple):
    """The rows of a decode step as the host sends them. Rows of padding have slot 0."""

    slots: Tensor
    """int64 [S]."""

    positions: Tensor
    """int64 [S]."""

    kv_indices: Tensor
    """int64 [S]."""

    noise_keys: Tensor
    """int64 [S, 2]."""

    new_blocks: Tensor
    """int32 [S], the last block of a row if its slot's table on the device does not have it yet; -1 for others. Only
    with lists."""


class SlotState(NamedTuple):
    """State of all slots on the device."""

    last_tokens: Tensor
    """int64 [slots]."""

    tokens: Tensor
    """int32 [kv indices], the token at each; the step's tokens are stored there."""

    params: Tensor
    """int32 [slots, F]."""

    block_tables: Tensor
    """int32 [slots, blocks]; the step's new blocks are stored there."""


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """Memory of a step."""

    slots: Tensor
    """int64 [S]."""

    token_ids: Tensor
    """int64 [T]."""

    positions: Tensor
    """int64 [T]."""

    noise_keys: Tensor
    """int64 [S, 2]."""

    device_params: Tensor
    """int32 [S, F]."""

    memory: RecordedMemory
    """What attention reads; its kv indices are of T tokens."""

    @classmethod
    def allocate(
        cls, max_rows: int, max_tokens: int, memory: RecordedMemory | None, device: torch.device
    ) -> "RecordedInputs":
        """max_rows: of decode steps. max_tokens: of any step, at least max_rows. memory: of the attention backend; None
        if it cannot be recorded."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        params = torch.zeros((max_rows, len(SamplingParams._fields)), dtype=torch.int32, device=device)
        memory = memory or RecordedMemory.allocate(max_rows, 0, device)
        memory = memory._replace(kv_indices=zeros(max_tokens))
        tokens = zeros(max_tokens), zeros(max_tokens)
        return cls(zeros(max_rows), *tokens, zeros(max_rows, 2), params, memory)

    def cut(self, num_rows: int) -> "RecordedInputs":
        """The first tokens and rows, in the same memory."""
        return RecordedInputs(
            self.slots[:num_rows],
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.noise_keys[:num_rows],
            self.device_params[:num_rows],
            self.memory.cut(num_rows),
        )


def fill_inputs_by_torch(
    staged: StagedRows, slots: SlotState, page_size: int, inputs: RecordedInputs, lists: BlockLists | None
) -> None:
    """Fill `inputs`, and store the rows' tokens at their kv indices in `slots`, with stock torch operations.

    lists: filled too, each row being a segment of all its tokens; None: attention has other lists, or none."""
    inputs.slots.copy_(staged.slots)
    inputs.positions.copy_(staged.positions)
    inputs.noise_keys.copy_(staged.noise_keys)
    inputs.memory.kv_indices.copy_(staged.kv_indices)
    torch.index_select(slots.last_tokens, 0, staged.slots, out=inputs.token_ids)
    torch.index_select(slots.params, 0, staged.slots, out=inputs.device_params)
    slots.tokens[staged.kv_indices] = inputs.token_ids.int()
    if lists is not None:
        first_entries = staged.slots * slots.block_tables.shape[1]
        last_entries = first_entries + (lists.kv_lengths - 1) // page_size
        tables = slots.block_tables.view(-1)
        tables[last_entries] = torch.where(staged.new_blocks >= 0, staged.new_blocks, tables[last_entries])
        fill_lists_by_torch(slots.block_tables, first_entries, page_size, lists)
