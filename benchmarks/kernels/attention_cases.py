"""Calls that the CPU benchmarks time: attention over synthetic KV caches, and the machine's best read and gemm."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.cpu.bindings import load_kernels

# S sequences, R query rows, H query heads, K key/value heads, D head size, P tokens per block, B blocks per sequence

HIDDEN_SIZE = 576
MLP_SIZE = 1536
NUM_LAYERS = 30
WINDOW_LAYERS = 4
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
PAGE_SIZE = 16
DTYPE = torch.bfloat16
POOL_SIZE = 256
"""Numbers of a token's keys in a pool, of all KV heads."""

Calls = Sequence[Callable[[], object]]
Name = TypeVar("Name", bound=Hashable)


def time_interleaved(candidates: Mapping[Name, Calls], num_rounds: int) -> dict[Name, float]:
    """Seconds per call of each candidate. Each round makes all calls of one candidate, then all of the next.

    Returns the first decile over all rounds but the first, so that times slowed by other programs do not count."""
    times: dict[Name, list[float]] = {name: [] for name in candidates}
    for round_index in range(num_rounds + 1):
        for name, calls in candidates.items():
            for call in calls:
                start = time.perf_counter()
                call()
                if round_index:
                    times[name].append(time.perf_counter() - start)
    return {name: sorted(taken)[len(taken) // 10] for name, taken in times.items()}


def reads(num_megabytes: int = 512) -> tuple[Calls, int]:
    """Sums over slices of an array too large for any cache -> calls, bytes that each reads."""
    slices = torch.ones(num_megabytes * 2**18).view(16, -1)
    return [one.sum for one in slices], slices[0].nbytes


def large_gemm() -> tuple[Calls, int]:
    """-> calls, floating-point operations of each."""
    x, weight = torch.randn(2048, 2048).to(DTYPE), torch.randn(4096, 2048).to(DTYPE)
    return [lambda: torch.nn.functional.linear(x, weight)], 2 * 2048 * 2048 * 4096


def gemms(num_rows: int) -> tuple[Calls, int]:
    """The MLP's first gemm, with the weights of several layers -> calls, floating-point operations of each."""
    x = torch.randn(num_rows, HIDDEN_SIZE).to(DTYPE)
    weights = [torch.randn(2 * MLP_SIZE, HIDDEN_SIZE).to(DTYPE) for _ in range(8)]

    def multiply(weight: Tensor) -> Callable[[], object]:
        return lambda: torch.nn.functional.linear(x, weight)

    return [multiply(weight) for weight in weights], 2 * num_rows * HIDDEN_SIZE * 2 * MLP_SIZE


def make_filled(name: str, num_layers: int, num_blocks: int, window: int | None = None) -> AttentionBackend:
    """A backend whose KV cache is full of random keys and values, the same in every layer and every backend.

    window: of all layers."""
    spec = AttentionSpec(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, window=window)
    sizes = (num_layers, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
    shape = KVShape(*sizes, DTYPE, torch.device("cpu"), layers=(spec,) * num_layers)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(num_blocks)
    num_tokens = num_blocks * PAGE_SIZE
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(DTYPE)
    backend.plan(PagedLayout(torch.arange(num_tokens), ()))
    for layer in range(num_layers):
        backend.write(key, value, layer)
    return backend


def make_part(tables: Sequence[Tensor], num_rows: int, num_tokens: int, causal: bool, is_partial: bool) -> PagedPart:
    """A part with `num_rows` query rows for each block table, each attending to `num_tokens` tokens."""
    count = len(tables)
    return PagedPart(
        first_row=0,
        num_rows=num_rows * count,
        query_starts=torch.arange(count + 1, dtype=torch.int32) * num_rows,
        block_table=torch.stack(list(tables)).int(),
        kv_lengths=torch.full((count,), num_tokens, dtype=torch.int32),
        causal=causal,
        is_partial=is_partial,
    )


def scattered_blocks(count: int) -> Tensor:
    """Ids of `count` blocks in random order, without the padding block -> int64 [count]."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1


def decode(name: str, num_sequences: int, num_tokens: int) -> tuple[Calls, int]:
    """One query row per sequence, through the KV caches of all layers -> calls, bytes of KV that each must read."""
    blocks_each = -(-num_tokens // PAGE_SIZE)
    blocks = scattered_blocks(num_sequences * blocks_each)
    backend = make_filled(name, NUM_LAYERS, len(blocks) + 1)
    part = make_part(blocks.view(num_sequences, blocks_each).unbind(), 1, num_tokens, causal=True, is_partial=False)
    num_bytes = 2 * num_sequences * num_tokens * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return _through_layers(backend, part, NUM_LAYERS), num_bytes


def windowed(name: str, num_sequences: int, num_tokens: int, max_tokens: int, window: int) -> Calls:
    """One query row per sequence in layers with a window, through the KV caches of WINDOW_LAYERS layers.

    max_tokens: contexts of this size fit the cache: as in a server, its size does not depend on num_tokens."""
    blocks_each = -(-num_tokens // PAGE_SIZE)
    blocks = scattered_blocks(num_sequences * -(-max_tokens // PAGE_SIZE))
    backend = make_filled(name, WINDOW_LAYERS, len(blocks) + 1, window)
    blocks = blocks[: num_sequences * blocks_each]
    part = make_part(blocks.view(num_sequences, blocks_each).unbind(), 1, num_tokens, causal=True, is_partial=False)
    return _through_layers(backend, part, WINDOW_LAYERS)


def prefix_part(name: str, num_rows: int, num_tokens: int) -> tuple[Calls, int]:
    """The rows of one prefix group attend to its prefix -> calls, floating-point operations of each."""
    blocks = scattered_blocks(-(-num_tokens // PAGE_SIZE))
    backend = make_filled(name, 8, len(blocks) + 1)
    part = make_part([blocks], num_rows, num_tokens, causal=False, is_partial=False)
    return _through_layers(backend, part, 8), 4 * num_rows * num_tokens * NUM_HEADS * HEAD_DIM


def _through_layers(backend: AttentionBackend, part: PagedPart, num_layers: int) -> Calls:
    layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (part,))
    backend.plan(layout)
    query = torch.randn(part.num_rows, NUM_HEADS, HEAD_DIM).to(DTYPE)
    return [partial(attend_rows, backend, query, layer, layout) for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Group:
    """Attention calls for the decode rows of one prefix group, one call per layer."""

    whole: Calls
    """Each row attends to its whole context."""
    split: Calls
    """A prefix part for all rows and a suffix part for each row, merged."""


def group(name: str, num_rows: int, num_prefix_tokens: int, num_suffix_tokens: int) -> Group:
    """num_prefix_tokens: a multiple of the page size. The sequences share the prefix's blocks in both variants."""
    prefix_blocks, own_blocks = num_prefix_tokens // PAGE_SIZE, -(-num_suffix_tokens // PAGE_SIZE)
    blocks = scattered_blocks(prefix_blocks + num_rows * own_blocks)
    shared, own = blocks[:prefix_blocks], blocks[prefix_blocks:].view(num_rows, own_blocks)
    length = num_prefix_tokens + num_suffix_tokens
    whole = make_part([torch.cat((shared, one)) for one in own], 1, length, causal=True, is_partial=False)
    suffix = make_part(own.unbind(), 1, num_suffix_tokens, causal=True, is_partial=True)
    prefix = make_part([shared], num_rows, num_prefix_tokens, causal=False, is_partial=True)
    query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(DTYPE)

    def calls(layout: PagedLayout) -> Calls:
        backend = make_filled(name, NUM_LAYERS, len(blocks) + 1)
        backend.plan(layout)
        return [partial(attend_rows, backend, query, layer, layout) for layer in range(NUM_LAYERS)]

    nothing = torch.zeros(0, dtype=torch.int64)
    return Group(calls(PagedLayout(nothing, (whole,))), calls(PagedLayout(nothing, (suffix,), prefix)))


class Pool:
    """A cache of one layer, larger than the processor's, for heads of any size: each call reads blocks of its own."""

    def __init__(self, dtype: torch.dtype, head_dim: int, num_bytes: int) -> None:
        self._sizes = (1, POOL_SIZE // head_dim, head_dim, PAGE_SIZE, dtype)
        kernels = load_kernels()
        assert kernels is not None, "the pool is of the CPU kernels"
        self._kernels = kernels
        shape = self.shape(1)
        self.token_bytes = shape.bytes_per_block // PAGE_SIZE
        num_blocks = num_bytes // shape.bytes_per_block
        backend = CpuBackend(shape, kernels)
        backend.allocate(num_blocks + 1)
        num_tokens = 256 * PAGE_SIZE
        key, value = torch.randn(2, num_tokens, shape.num_kv_heads, head_dim).to(DTYPE)
        backend.plan(PagedLayout(torch.arange(PAGE_SIZE, PAGE_SIZE + num_tokens), ()))
        backend.write(key, value, 0)
        self._cache = backend.caches[0]
        for first in range(257, num_blocks + 1, 256):
            count = min(256, num_blocks + 1 - first)
            self._cache[0, first : first + count] = self._cache[0, 1 : 1 + count]
        self._blocks, self._next = scattered_blocks(num_blocks), 0

    def shape(self, group: int) -> KVShape:
        """group: query heads for each KV head."""
        num_layers, num_kv_heads, head_dim, page_size, dtype = self._sizes
        heads = (num_kv_heads * group, num_kv_heads, head_dim)
        return KVShape(num_layers, *heads, page_size, dtype, torch.device("cpu"), activation_dtype=DTYPE)

    def calls(self, group: int, num_sequences: int, num_rows: int, num_tokens: int, count: int) -> Calls:
        """Attention of the last num_rows rows of each sequence of num_tokens."""
        shape, made = self.shape(group), []
        for _ in range(count):
            backend = CpuBackend(shape, self._kernels)
            backend._cache = self._cache
            tables = [self._take(-(-num_tokens // PAGE_SIZE)) for _ in range(num_sequences)]
            part = make_part(tables, num_rows, num_tokens, causal=True, is_partial=False)
            layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (part,))
            backend.plan(layout)
            query = torch.randn(part.num_rows, shape.num_heads, shape.head_dim).to(DTYPE)
            made.append(partial(attend_rows, backend, query, 0, layout))
        return made

    def _take(self, count: int) -> Tensor:
        if self._next + count > len(self._blocks):
            self._next = 0
        self._next += count
        return self._blocks[self._next - count : self._next]


def flex_decode(num_sequences: int, num_tokens: int) -> tuple[Calls, int]:
    """As `decode`, with compiled flex_attention. Its keys and values are contiguous, which favours it."""
    num_bytes = 2 * num_sequences * num_tokens * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return _flex(num_sequences, 1, num_tokens, NUM_LAYERS), num_bytes


def flex_prefix_part(num_rows: int, num_tokens: int) -> tuple[Calls, int]:
    """As `prefix_part`, with compiled flex_attention over contiguous keys and values."""
    return _flex(1, num_rows, num_tokens, 8), 4 * num_rows * num_tokens * NUM_HEADS * HEAD_DIM


def _flex(num_sequences: int, num_rows: int, num_tokens: int, num_layers: int) -> Calls:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=False))
    query = torch.randn(num_sequences, NUM_HEADS, num_rows, HEAD_DIM).to(DTYPE)
    size = (num_sequences, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    caches = [torch.randn(2, *size).to(DTYPE) for _ in range(num_layers)]

    def attend(cache: Tensor) -> Callable[[], object]:
        return lambda: compiled(query, cache[0], cache[1], enable_gqa=True)

    return [torch.no_grad()(attend(cache)) for cache in caches]
