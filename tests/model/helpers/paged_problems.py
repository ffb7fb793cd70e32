"""Attention over segments with scattered blocks in a KV cache of random values, the same for every backend."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tokasaurus.messages.forward import WindowBlocks
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart, as_stored
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import Kernels, load_kernels

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Segment:
    num_rows: int
    kv_length: int


def make_part(
    segments: list[Segment], tables: list[list[int]], first_row: int, causal: bool, is_partial: bool = False
) -> PagedPart:
    starts = torch.tensor([0, *torch.tensor([s.num_rows for s in segments]).cumsum(0).tolist()], dtype=torch.int32)
    width = max(len(table) for table in tables)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    return PagedPart(
        first_row=first_row,
        num_rows=int(starts[-1]),
        query_starts=starts,
        block_table=padded,
        kv_lengths=torch.tensor([s.kv_length for s in segments], dtype=torch.int32),
        causal=causal,
        is_partial=is_partial,
    )


def scattered_tables(segments: list[Segment], page_size: int, seed: int) -> tuple[list[list[int]], int]:
    """Disjoint blocks in random order for each segment -> block tables, number of blocks including padding."""
    counts = [-(-segment.kv_length // page_size) for segment in segments]
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    tables, num_used = [], 0
    for count in counts:
        tables.append(order[num_used : num_used + count])
        num_used += count
    return tables, sum(counts) + 1


def fill(
    backend: AttentionBackend,
    shape: KVShape,
    segments: list[Segment],
    tables: list[list[int]],
    kept_as: torch.dtype | None = None,
) -> None:
    """Write seeded random keys and values for every token of every segment, in every layer. kept_as: dtype of a cache
    that they are rounded to; None: none."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(shape.num_layers):
        for segment, table in zip(segments, tables, strict=True):
            page_size, tokens = shape.page_size, range(segment.kv_length)
            kv_indices = [table[token // page_size] * page_size + token % page_size for token in tokens]
            size = (segment.kv_length, shape.num_kv_heads, shape.head_dim)
            key, value = (torch.randn(size, generator=generator).to(shape.query_dtype) for _ in range(2))
            if kept_as is not None:
                key, value = (as_stored(x, kept_as).to(torch.float32) for x in (key, value))
            backend.plan(PagedLayout(torch.tensor(kv_indices), ()))
            backend.write(key, value, layer)


def fill_with_outliers(backend: AttentionBackend, shape: KVShape, num_blocks: int) -> None:
    """Fill all blocks, padding included, with large values: one read by mistake would dominate the result."""
    num_tokens = num_blocks * shape.page_size
    outliers = torch.full((num_tokens, shape.num_kv_heads, shape.head_dim), 100.0, dtype=shape.query_dtype)
    backend.plan(PagedLayout(torch.arange(num_tokens), ()))
    for layer in range(shape.num_layers):
        backend.write(outliers, outliers, layer)


def attend_all(
    name: str,
    shape: KVShape,
    segments: list[Segment],
    causal: bool,
    layer: int,
    seed: int,
    kernels: Kernels | None = None,
    is_partial: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse of one part over seeded random keys and values. kernels: None for those of this machine. The
    reference keeps in float32 what an int8 cache of the shape would keep."""
    kept_as = None
    if name == "reference" and shape.dtype == torch.int8:
        kept_as, shape = torch.int8, replace(shape, dtype=torch.float32, activation_dtype=shape.query_dtype)
    backend = make_backend(name, shape, load_kernels() if kernels is None else kernels)
    tables, num_blocks = scattered_tables(segments, shape.page_size, seed)
    backend.allocate(num_blocks * (1 + shape.num_groups))
    if shape.num_groups:
        order = np.random.default_rng(seed).permutation(np.arange(num_blocks, num_blocks * (1 + shape.num_groups)))
        blocks, own = np.arange(num_blocks), order.reshape(num_blocks, shape.num_groups)
        backend.place_windows(WindowBlocks(blocks.astype(np.int32), own.astype(np.int32)))
    fill_with_outliers(backend, shape, num_blocks)
    fill(backend, shape, segments, tables, kept_as)
    part = make_part(segments, tables, 0, causal, is_partial)
    backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((part.num_rows, shape.num_heads, shape.head_dim), generator=generator).to(shape.query_dtype)
    return backend.attend(query, layer, part)
