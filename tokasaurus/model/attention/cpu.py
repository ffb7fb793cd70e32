"""Paged attention on the CPU. The kernels (attention_layout.h, kv_write.h) fix the layout of the cache."""

import ctypes
import math
import threading
from typing import Any

from torch import Tensor

from tokasaurus.messages.forward import WindowBlocks
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart, WindowTables, tokens_after
from tokasaurus.model.cpu.bindings import (
    ACTIVATION_DTYPES,
    KV_CACHE_DTYPES,
    Kernels,
    LayerScoresStruct,
    PagedForwardStruct,
    PagedPartStruct,
    allocate_huge_pages,
    cache_code,
    give_back,
    touch_in_background,
)

# T tokens, H query heads, K key/value heads, D head size, P page size


def why_unfit(shape: KVShape, kernels: Kernels) -> str | None:
    """The property of the model or page size that the kernels do not support, as text; None if they support all."""
    if shape.dtype not in KV_CACHE_DTYPES:
        return f"a KV cache of {shape.dtype}"
    if shape.query_dtype not in ACTIVATION_DTYPES:
        return f"dtype {shape.query_dtype}"
    if shape.head_dim % 16 or shape.head_dim > kernels.max_head_dim:
        return f"head size {shape.head_dim} (a multiple of 16, at most {kernels.max_head_dim})"
    if shape.num_heads // shape.num_kv_heads > kernels.max_group:
        return f"{shape.num_heads // shape.num_kv_heads} query heads per KV head (at most {kernels.max_group})"
    if shape.page_size % 16:
        return f"page_size={shape.page_size} (a multiple of 16)"
    return None


class CpuBackend:
    """KV cache as [layers of a block, blocks, K, 2 (keys, values), P * D]; the kernels define the order in the last
    dimension. With int8 that is P * (D + 2): a head's scales, of two bytes each, lie behind its keys and values."""

    computes_groups = True

    def __init__(self, shape: KVShape, kernels: Kernels) -> None:
        unfit = why_unfit(shape, kernels)
        if unfit is not None:
            raise ValueError(f"the CPU kernels do not support {unfit}")
        self._shape = shape
        self._kernels = kernels
        self._scores = (LayerScoresStruct * shape.num_layers)()
        for index in range(shape.num_layers):
            layer = shape.scores_of(index)
            sinks = None if layer.sinks is None else layer.sinks.data_ptr()
            self._scores[index] = LayerScoresStruct(
                *(layer.scale, layer.softcap or 0, layer.window or 0, sinks, None, shape.place_of(index).number)
            )

    @property
    def caches(self) -> list[Tensor]:
        return [self._cache]

    def allocate(self, num_blocks: int) -> None:
        shape = self._shape
        num_layers = shape.block_layers or shape.num_layers
        in_block = shape.bytes_per_block // (2 * num_layers * shape.num_kv_heads * shape.dtype.itemsize)
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, in_block)
        # Blocks are read in any order: with pages of 4 KiB, nearly every block would miss in the TLB.
        memory = allocate_huge_pages(math.prod(size) * shape.dtype.itemsize)
        self._cache = memory.view(shape.dtype).view(size)  # fresh memory is zero
        self._windows = WindowTables(shape.num_groups, num_blocks)
        for index in range(shape.num_layers):
            if group := shape.place_of(index).group:
                self._scores[index].blocks = self._windows.blocks[group - 1].ctypes.data

    def place_windows(self, windows: WindowBlocks) -> None:
        self._windows.place(windows)

    def touch_in_background(self, num_threads: int, /) -> list[threading.Thread]:
        """Make the system provide the cache's memory, low block ids first, since they are used first."""
        return touch_in_background(self._cache.flatten(1), self._kernels, num_threads)

    def give_back(self) -> None:
        give_back(self._cache)

    def take_again(self) -> None:
        """The system provides the memory at its next use."""

    def plan(self, layout: PagedLayout) -> None:
        self._layout = layout  # owns what the structs point to
        self._after_prefix = None
        if layout.prefix is not None and self._shape.windows != {None}:
            self._after_prefix = tokens_after(layout, layout.prefix).int()
        parts = (PagedPartStruct * len(layout.parts))(*map(self._struct, layout.parts))
        prefix = None if layout.prefix is None else ctypes.pointer(self._struct(layout.prefix))
        self._paged = self.paged_forward(layout.kv_indices.data_ptr(), parts, prefix)

    def paged_forward(
        self, kv_indices: int, parts: "ctypes.Array[PagedPartStruct]", prefix: Any = None
    ) -> PagedForwardStruct:
        """The kernels' description of a forward over the cache as allocated now. kv_indices: address of int64 [T]."""
        return PagedForwardStruct(
            *(cache_code(self._cache), self._cache.data_ptr(), self._cache[0].numel()),
            *(self._shape.page_size, kv_indices, parts, len(parts), prefix, self._scores),
        )

    @property
    def planned(self) -> PagedForwardStruct:
        """The cache and the planned layout, for kernels that run whole layers."""
        return self._paged

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        scores = self._scores[layer_index]
        cache = self._cache[scores.place]
        self._kernels.write_kv(key, value, self._layout.kv_indices, cache, self._shape.page_size, scores.blocks)

    def attend(
        self, query: Tensor, layer_index: int, part: PagedPart, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores[layer_index]
        if part is self._layout.prefix:  # sinks count once
            scores = LayerScoresStruct(
                *(scores.scale, scores.softcap, scores.window, None, scores.blocks, scores.place)
            )
        attended, lse = self._kernels.attend(
            *(query, self._cache[scores.place], self._struct(part), part.is_partial, self._shape.page_size, scores)
        )
        return attended if output is None else output.copy_(attended), lse

    def attend_layout(self, query: Tensor, layer_index: int, layout: PagedLayout) -> Tensor:
        assert layout is self._layout, "plan(layout) must come first"
        return self._kernels.attend_layout(query, layer_index, self._paged, self._shape.num_kv_heads)

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        return self._kernels.merge(first, second, output)

    def _struct(self, part: PagedPart) -> PagedPartStruct:
        table = part.block_table
        assert table is not None, "a CPU reads tables on the host"
        after = self._after_prefix if part is self._layout.prefix else None
        return PagedPartStruct(
            *(part.first_row, part.num_rows, table.shape[0], part.query_starts.data_ptr()),
            *(table.data_ptr(), table.stride(0), part.kv_lengths.data_ptr(), part.causal, part.is_partial),
            None if after is None else after.data_ptr(),
        )
