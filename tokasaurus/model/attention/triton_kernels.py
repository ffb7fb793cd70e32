"""Triton kernels for paged attention on CUDA: write keys and values, merge two parts, count sinks, list the blocks of
segments.

Each is one launch and never waits for the device. Plain torch does the same, and is easier to read:
`TorchBackend.write`, `row_split.merge_partial`, `row_split.count_sinks` and `block_lists.fill_lists`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.model.attention.backend import BlockLists

# T tokens, K key/value heads, D head size, N kv indices of the cache, R rows, H query heads, S segments

_WRITE_BLOCK = 1024
"""Most numbers of a token's keys that one program writes."""

_MERGE_BLOCK = 2048
"""Numbers of the output that one program computes, about."""

LIST_BLOCK = 1024
"""Segments whose lengths are added, and blocks that are copied, at once."""


def write_kv(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, kv_indices: Tensor, page_size: int) -> None:
    """Store key and value [T, K, D] at kv_indices, int64 [T], of one layer's cache.

    keys and values: [N, K, D] with equal strides; the stride of D is 1, the others are any. Tokens in block 0, the
    padding block, are not stored, nor are those with a negative kv index. Values are converted as by `as_stored`.
    """
    assert keys.stride() == values.stride()
    assert keys.stride(2) == key.stride(2) == value.stride(2) == 1
    assert kv_indices.is_contiguous()
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    block = min(_WRITE_BLOCK, triton.next_power_of_2(num_heads * head_dim))
    _write_token[(num_tokens, triton.cdiv(num_heads * head_dim, block))](
        *(key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1)),
        *(keys, values, keys.stride(0), keys.stride(1), kv_indices),
        FIRST_STORED=page_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        LARGEST=torch.finfo(torch.float16).max if keys.dtype == torch.float16 else None,
        BLOCK=block,
    )


def merge_partial(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor, is_base_2: bool = False
) -> Tensor:
    """`row_split.merge_partial` as one kernel, on contiguous tensors. It reads no output of a part without weight."""
    (first_output, first_lse), (second_output, second_lse) = first, second
    assert all(tensor.is_contiguous() for tensor in (*first, *second, output))
    assert first_lse.shape == second_lse.shape == first_output.shape[:2]
    assert first_output.shape == second_output.shape == output.shape
    head_dim = first_output.shape[-1]
    num_rows = first_lse.numel()
    columns = triton.next_power_of_2(head_dim)
    rows = max(1, _MERGE_BLOCK // columns)
    if num_rows:
        _merge_rows[(triton.cdiv(num_rows, rows),)](
            *(first_output, first_lse, second_output, second_lse, output, num_rows),
            HEAD_DIM=head_dim,
            ROWS=rows,
            COLUMNS=columns,
            IS_BASE_2=is_base_2,
        )
    return output


def count_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """`row_split.count_sinks` as one kernel, on contiguous tensors."""
    assert all(tensor.is_contiguous() for tensor in (output, lse, sinks))
    num_heads, head_dim = output.shape[1:]
    assert lse.shape == output.shape[:2]
    assert sinks.shape == (num_heads,)
    num_rows = lse.numel()
    columns = triton.next_power_of_2(head_dim)
    rows = max(1, _MERGE_BLOCK // columns)
    if num_rows:
        _add_sinks[(triton.cdiv(num_rows, rows),)](
            *(output, lse, sinks, num_rows), NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROWS=rows, COLUMNS=columns
        )


def fill_lists(block_tables: Tensor, first_entries: Tensor, page_size: int, lists: BlockLists) -> None:
    """`block_lists.fill_lists` as one kernel."""
    assert block_tables.is_contiguous()
    num_segments = len(first_entries)
    _list_blocks[(num_segments + 1,)](
        *(block_tables, first_entries, lists.kv_lengths, num_segments),
        *(lists.starts, lists.blocks, lists.last_lengths),
        PAGE_SIZE=page_size,
        BLOCK=LIST_BLOCK,
    )


@triton.jit
def _write_token(
    key, key_token_stride, key_head_stride, value, value_token_stride, value_head_stride,
    keys, values, token_stride, head_stride, kv_indices,
    FIRST_STORED: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kv_index = tl.load(kv_indices + token)
    size = tl.where(kv_index >= FIRST_STORED, NUM_HEADS * HEAD_DIM, 0)
    is_stored = entries < size
    heads, columns = (entries // HEAD_DIM).to(tl.int64), entries % HEAD_DIM
    new_key = tl.load(key + token * key_token_stride + heads * key_head_stride + columns, mask=is_stored)
    new_value = tl.load(value + token * value_token_stride + heads * value_head_stride + columns, mask=is_stored)
    target = kv_index * token_stride + heads * head_stride + columns
    tl.store(keys + target, _as_stored(new_key, keys.dtype.element_ty, LARGEST), mask=is_stored)
    tl.store(values + target, _as_stored(new_value, values.dtype.element_ty, LARGEST), mask=is_stored)


@triton.jit
def _as_stored(x, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """LARGEST: the limit to clamp to, or None. NaN stays NaN, which minimum and maximum would replace."""
    x = x.to(tl.float32)
    if LARGEST is not None:
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_rows(
    first, first_lse, second, second_lse, merged, num_rows,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_BASE_2: tl.constexpr,
):  # fmt: skip
    """A row here is one head of a row of the forward."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = rows < num_rows
    first_log = tl.load(first_lse + rows, mask=in_range, other=0.0)
    second_log = tl.load(second_lse + rows, mask=in_range, other=0.0)
    # The least float32 avoids -inf minus -inf.
    largest = tl.maximum(tl.maximum(first_log, second_log), -3.4028234663852886e38)
    first_log, second_log = first_log - largest, second_log - largest
    first_weight = (tl.exp2(first_log) if IS_BASE_2 else tl.exp(first_log))[:, None]
    second_weight = (tl.exp2(second_log) if IS_BASE_2 else tl.exp(second_log))[:, None]
    total = first_weight + second_weight
    columns = tl.arange(0, COLUMNS)[None, :]
    size = tl.where(in_range, HEAD_DIM, 0)[:, None]
    first_size = tl.where(first_weight > 0.0, size, 0)
    second_size = tl.where(second_weight > 0.0, size, 0)
    offsets = rows[:, None] * HEAD_DIM + columns
    first_output = tl.load(first + offsets, mask=columns < first_size, other=0.0).to(tl.float32)
    second_output = tl.load(second + offsets, mask=columns < second_size, other=0.0).to(tl.float32)
    result = (first_output * first_weight + second_output * second_weight) / tl.where(total == 0.0, 1.0, total)
    tl.store(merged + offsets, result.to(merged.dtype.element_ty), mask=columns < size)


@triton.jit(do_not_specialize=["num_rows"])
def _add_sinks(
    output, lse, sinks, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row here is one head of a row of the forward."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = rows < num_rows
    seen = tl.load(lse + rows, mask=in_range, other=0.0)
    sink = tl.load(sinks + rows % NUM_HEADS) * 1.4426950408889634  # to base 2
    largest = tl.maximum(seen, sink)
    weight = tl.exp2(seen - largest)
    total = weight + tl.exp2(sink - largest)
    tl.store(lse + rows, largest + tl.log2(total), mask=in_range)
    columns = tl.arange(0, COLUMNS)[None, :]
    size = tl.where(in_range, HEAD_DIM, 0)[:, None]
    offsets = rows[:, None] * HEAD_DIM + columns
    values = tl.load(output + offsets, mask=columns < size, other=0.0).to(tl.float32) * (weight / total)[:, None]
    tl.store(output + offsets, values.to(output.dtype.element_ty), mask=columns < size)


@triton.jit(do_not_specialize=["num_segments"])
def _list_blocks(
    tables, first_entries, kv_lengths, num_segments, starts, blocks, last_lengths,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per segment, and one for the end of the last."""
    segment = tl.program_id(0)
    table = tables
    if segment < num_segments:
        table += tl.load(first_entries + segment)
    list_segment(segment, num_segments, table, -1, kv_lengths, starts, blocks, last_lengths, PAGE_SIZE, BLOCK)


@triton.jit
def list_segment(
    segment, num_segments, table, last_block, kv_lengths, starts, blocks, last_lengths,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lists of one segment, or the end of the last one. It adds up the blocks of all segments before its own, so
    that no program waits for another. table: where the segment's blocks begin. last_block: instead of the table's; -1
    if the table has it."""
    offsets = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, segment, BLOCK):
        lengths = tl.load(kv_lengths + first + offsets, mask=first + offsets < segment, other=0)
        counts += (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(counts)
    tl.store(starts + segment, start)
    if segment < num_segments:
        length = tl.load(kv_lengths + segment)
        count = (length + PAGE_SIZE - 1) // PAGE_SIZE
        tl.store(last_lengths + segment, length - (count - 1) * PAGE_SIZE)
        for first in range(0, count, BLOCK):
            entries = first + offsets
            ids = tl.load(table + entries, mask=entries < count)
            ids = tl.where((entries == count - 1) & (last_block >= 0), last_block, ids)
            tl.store(blocks + start + entries, ids, mask=entries < count)
