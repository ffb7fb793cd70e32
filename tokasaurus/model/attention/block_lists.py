"""Block lists of segments, built on the device from the block tables of all slots, or on the host from a layout's."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import (
    AttentionBackend,
    BlockLists,
    KVShape,
    PagedLayout,
    PagedPart,
    RecordableBackend,
    RecordedMemory,
)
from tokasaurus.model.staging.staging import Staging
from tokasaurus.model.triton_choice import uses_triton

# S segments of a part, N blocks of all of them, M of the segments, B blocks of the longest of these


def fill_lists(block_tables: Tensor, first_entries: Tensor, page_size: int, lists: BlockLists) -> None:
    """Fill the starts, blocks and last lengths of `lists` from its kv_lengths. Never waits for the device.

    block_tables: int32 [slots, blocks], contiguous. first_entries: int64 [S], where each segment's blocks begin in the
    flattened tables. A segment of no tokens has no blocks, and page_size as its last length.
    """
    if uses_triton(block_tables.device, "attention"):
        from tokasaurus.model.attention import triton_kernels

        triton_kernels.fill_lists(block_tables, first_entries, page_size, lists)
    else:
        fill_lists_by_torch(block_tables, first_entries, page_size, lists)


def fill_lists_by_torch(block_tables: Tensor, first_entries: Tensor, page_size: int, lists: BlockLists) -> None:
    """`fill_lists` with stock torch operations."""
    counts = (lists.kv_lengths + (page_size - 1)) // page_size
    lists.last_lengths.copy_(lists.kv_lengths - (counts - 1) * page_size)
    lists.starts[:1].zero_()
    lists.starts[1:].copy_(counts.cumsum(0))
    entries = torch.arange(len(lists.blocks), device=lists.blocks.device)
    segments = torch.searchsorted(lists.starts[1:], entries, right=True)
    entries += (first_entries - lists.starts[:-1])[segments]
    torch.index_select(block_tables.view(-1), 0, entries, out=lists.blocks)


def as_in_steps(layout: PagedLayout, backend: AttentionBackend, shape: KVShape) -> PagedLayout:
    """A layout made on the host, of parts with block tables, as steps have it on the shape's device: with block lists
    there in place of the tables. Unchanged for backends that read tables, those on a CPU. Waits for the device."""
    if shape.device.type == "cpu" and not isinstance(backend, RecordableBackend):
        return layout
    return replace(
        layout,
        kv_indices=layout.kv_indices.to(shape.device),
        parts=tuple(_with_lists(part, shape) for part in layout.parts),
        prefix=None if layout.prefix is None else _with_lists(layout.prefix, shape),
    )


def _with_lists(part: PagedPart, shape: KVShape) -> PagedPart:
    assert part.block_table is not None
    counts = -(-part.kv_lengths // shape.page_size)
    host_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    blocks = part.block_table[torch.arange(part.block_table.shape[1]) < counts.unsqueeze(1)]
    last_lengths = part.kv_lengths - (counts - 1) * shape.page_size
    on_device = (host_starts, blocks, last_lengths, part.query_starts, part.kv_lengths)
    lists = BlockLists(host_starts, *(x.int().to(shape.device) for x in on_device))
    return replace(part, block_table=None, lists=lists)


def in_recorded(layout: PagedLayout, memory: RecordedMemory) -> PagedLayout:
    """The layout of a step that is recorded or replayed, copied to where recorded launches read it."""
    (part,) = layout.parts
    own = memory.cut(part.num_rows)
    own.kv_indices.copy_(layout.kv_indices)
    if part.lists is not None:
        lists = lists_in(own, part.lists)
        for name in ("starts", "blocks", "last_lengths"):
            getattr(lists, name).copy_(getattr(part.lists, name))
        part = replace(part, lists=lists)
    return replace(layout, kv_indices=own.kv_indices, parts=(part,))


def lists_in(own: RecordedMemory, lists: BlockLists) -> BlockLists:
    """`lists` with the tensors of `own`, which has as many rows, instead of its own; they are not filled."""
    return replace(lists, starts=own.starts, blocks=own.blocks[: len(lists.blocks)], last_lengths=own.last_lengths)


def padded_tables(
    part: PagedPart, segments: Tensor, num_blocks: int, staging: Staging, first_blocks: Tensor | None = None
) -> Tensor:
    """The first num_blocks blocks of M segments, int64 [M * num_blocks] on the device, once staged work is launched.

    segments: int64 [M], on the host. A shorter segment's entries after its blocks are any of the cache's blocks.
    first_blocks: int64 [M], on the host, how many blocks of each segment to leave out; None: none.
    """
    if part.lists is None:
        assert part.block_table is not None
        if first_blocks is None:
            return staging.to_device(part.block_table[segments, :num_blocks].long().flatten().numpy())
        columns = (first_blocks.unsqueeze(1) + torch.arange(num_blocks)).clamp_max(part.block_table.shape[1] - 1)
        return staging.to_device(part.block_table[segments.unsqueeze(1), columns].long().flatten().numpy())
    tables = torch.empty(len(segments) * num_blocks, dtype=torch.int64, device=part.lists.blocks.device)
    left_out = None if first_blocks is None else staging.to_device(first_blocks.numpy())
    on_device = staging.to_device(segments.numpy())
    staging.then(partial(_fill_tables, part.lists, on_device, tables.view(-1, num_blocks), left_out))
    return tables


def _fill_tables(lists: BlockLists, segments: Tensor, tables: Tensor, left_out: Tensor | None) -> None:
    """segments: int64 [M]. tables: int64 [M, B]. left_out: int64 [M], blocks to leave out."""
    first, last = lists.starts[segments].unsqueeze(1), lists.starts[segments + 1].unsqueeze(1) - 1
    if left_out is not None:
        first = first + left_out.unsqueeze(1)
    columns = torch.arange(tables.shape[1], device=tables.device)
    tables.copy_(lists.blocks[(first + columns).minimum(last)])
