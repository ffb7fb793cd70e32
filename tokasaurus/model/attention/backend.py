"""The interface between the model and a paged-attention implementation.

A backend owns the layout of its KV cache. It knows nothing of requests, prefill or decode: it computes attention of the
query rows of a `PagedPart` over the blocks of that part. Shared code (row_split) handles a forward part by part.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.messages.forward import WindowBlocks
from tokasaurus.model.buffer_sizes import KVSizes, LayerPlace
from tokasaurus.model.staging.staging import Staging

# T tokens in this forward, H query heads, K key/value heads, D head size, S segments, B blocks of the longest segment,
# N blocks of all segments together


class Scores(NamedTuple):
    """How a layer makes scores of queries and keys; see AttentionSpec."""

    scale: float
    window: int | None
    """Negative: a token sees its own chunk of so many tokens."""
    softcap: float | None
    sinks: Tensor | None
    """float32 [H]; None: the layer has none."""


Count = TypeVar("Count", int, Tensor)


def first_seen(num_tokens: Count, window: int) -> Count:
    """The first token that the last of num_tokens sees, which may be negative. window: as in Scores."""
    return num_tokens - window if window > 0 else (num_tokens - 1) // -window * -window


@dataclass(frozen=True, slots=True)
class KVShape(KVSizes):
    """The shape of one worker's KV cache, with its dtypes and device."""

    dtype: torch.dtype
    """dtype of the cached keys and values."""

    device: torch.device
    activation_dtype: torch.dtype | None = None
    """dtype of the queries, keys and values passed in, and of outputs; None: the same as dtype."""

    layers: tuple[AttentionSpec, ...] = ()
    """How each of the worker's layers makes its scores; empty: all as usual."""
    sinks: tuple[Tensor | None, ...] = ()
    """Of each of these layers: float32 [H], on the device, which new weights are written into; or None. Empty: no layer
    has any."""
    places: tuple[LayerPlace, ...] = ()
    """Of each layer; empty: all are in the blocks of tables, in order."""
    num_groups: int = 0
    """Groups of layers with windows, in all stages, whose blocks are not those of tables."""

    def place_of(self, layer_index: int) -> LayerPlace:
        """Where a layer's keys and values are."""
        return self.places[layer_index] if self.places else LayerPlace(0, layer_index)

    def scores_of(self, layer_index: int) -> "Scores":
        """How a layer makes its scores."""
        sinks = self.sinks[layer_index] if self.sinks else None
        if not self.layers:
            return Scores(self.head_dim**-0.5, None, None, sinks)
        layer = self.layers[layer_index]
        return Scores(layer.scale, layer.window if layer.chunk is None else -layer.chunk, layer.softcap, sinks)

    @property
    def windows(self) -> set[int | None]:
        """The different windows of its layers, as in Scores; None: a layer sees all tokens."""
        return {self.scores_of(index).window for index in range(self.num_layers)}

    @property
    def has_chunks(self) -> bool:
        """Whether some layer sees chunks: then no step may have prefix groups, whose parts do not begin at position
        0."""
        return any(window is not None and window < 0 for window in self.windows)

    @property
    def query_dtype(self) -> torch.dtype:
        return self.dtype if self.activation_dtype is None else self.activation_dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: see KVSizes."""
        return self.block_bytes(str(self.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class BlockLists:
    """A part's segments on a device other than the host: compressed sparse rows (CSR) of blocks, and lengths.

    The device's tensors are filled after plan, by the time that the forward's first layer runs. FlashInfer calls
    starts, blocks and last_lengths indptr, indices and last_page_len.
    """

    host_starts: Tensor
    """int32 [S + 1], on the host: segment s has the blocks host_starts[s] : host_starts[s + 1] of `blocks`."""

    starts: Tensor
    """int32 [S + 1], the same on the device."""

    blocks: Tensor
    """int32 [N], block ids."""

    last_lengths: Tensor
    """int32 [S], tokens in each segment's last block."""

    query_starts: Tensor
    """int32 [S + 1], as in PagedPart."""

    kv_lengths: Tensor
    """int32 [S], as in PagedPart."""


@dataclass(frozen=True, slots=True)
class PagedPart:
    """Consecutive query rows of a forward, in S segments, each with its own list of blocks.

    Its tensors are on the host, where a backend's plan reads them; `lists` has what the device reads.
    """

    first_row: int
    """The part's first row among the forward's T tokens."""

    num_rows: int

    query_starts: Tensor
    """int32 [S + 1], relative to first_row: segment s has rows query_starts[s] : query_starts[s + 1]."""

    block_table: Tensor | None
    """int32 [S, B]. Segments may share blocks. None if `lists` has the blocks."""

    kv_lengths: Tensor
    """int32 [S], tokens to attend to. Later positions in the segment's blocks may have any finite values; later blocks
    in its table may be unfilled, or 0."""

    causal: bool
    """If true, a segment's last row sees all its kv_lengths tokens, the row before it one less, and so on; otherwise
    every row sees all of them (a shared prefix)."""

    is_partial: bool = False
    """The part covers only some of the tokens its rows attend to. Its output is to be merged with another part's, and
    so it comes with its LSE."""

    lists: BlockLists | None = None
    """None if the device is the host."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where the tokens of one forward are stored, and which tokens its rows attend to."""

    kv_indices: Tensor
    """int64 [T], the kv index of each token: block id * page_size + offset in the block. Never below 0; padding is in
    block 0."""

    parts: tuple[PagedPart, ...]
    """These cover the first rows of T in order; the rows after them are padding."""

    prefix: PagedPart | None = None
    """Shared prefixes of the rows of parts[0], one segment per prefix group; parts[0] then covers the tokens after the
    prefix, and both are partial. None without prefix groups."""

    staging: Staging | None = None
    """Brings the arrays of a backend's plan to the device; None if the plan does so itself."""


def tokens_seen(part: PagedPart) -> Tensor:
    """int64 [num_rows], on the host: how many of its segment's tokens each row sees, the first ones; a layer's window
    then ends with the last of them and of `tokens_after`."""
    counts = part.query_starts.long().diff()
    seen = part.kv_lengths.long().repeat_interleave(counts)
    if not part.causal:
        return seen
    ends = part.query_starts[1:].long().repeat_interleave(counts)
    return seen - (ends - 1 - torch.arange(len(ends)))


def tokens_after(layout: PagedLayout, part: PagedPart) -> Tensor:
    """int64 [num_rows], on the host: how many tokens each row sees that come after the part's, in another part."""
    if part is layout.prefix:
        return tokens_seen(layout.parts[0])
    return torch.zeros(part.num_rows, dtype=torch.int64)


class AttentionBackend(Protocol):
    """One worker's KV cache and attention over it.

    Order of calls: allocate once; then plan once per forward, and write and attend once per layer.
    """

    @property
    def computes_groups(self) -> bool:
        """Whether a layout may have a prefix."""

    @property
    def caches(self) -> list[Tensor]:
        """The tensors that hold the cache, after allocate. A compiler must know that `write` changes them."""

    def allocate(self, num_blocks: int) -> None:
        """Create the cache, filled with zeros; block 0 is the padding block. Replaces an earlier cache.

        Raises OSError or RuntimeError if memory does not suffice.
        """

    def touch_in_background(self, num_threads: int, /) -> list[threading.Thread]:
        """Let threads, at most num_threads, make the system provide the cache's memory before it is first used.

        Returns the running threads: none if the memory is there already or is left to be provided on first use.
        """

    def give_back(self) -> None:
        """Free the cache's memory, until `take_again`; what it holds is lost. Raises OSError."""

    def take_again(self) -> None:
        """The cache is as after `allocate`, in the same tensors, whose memory may be elsewhere. Only that of the CPU
        kernels stays where it was. Raises OSError or RuntimeError."""

    def place_windows(self, windows: WindowBlocks) -> None:
        """From now on, layers of groups with windows keep tokens of these blocks there: see KVShape.places."""

    def plan(self, layout: PagedLayout) -> None:
        """Prepare for the layers of one forward.

        Reads only the layout's host tensors, and launches nothing on a device: the layout's tensors there, and those
        that the plan stages, are filled afterwards.
        """

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        """Store key and value [T, K, D] at the planned layout's kv_indices. Those in block 0 need not be stored."""

    def attend(
        self, query: Tensor, layer_index: int, part: PagedPart, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """query [num_rows, H, D] of a planned part -> output [num_rows, H, D] and LSE, float32 [num_rows, H].

        query: numbers of one head lie together; rows and heads may have any strides. output: contiguous, in the query's
        dtype, to be filled and returned; None for memory of the backend's choice, as for every partial part. The
        output of a partial part has the query's dtype or a wider one. The LSE is the logarithm of the sum of
        exponentiated scores, natural or in the base that this backend's `merge` expects; it may be None for a part that
        is not partial. Scores are those of KVShape.scores_of; sinks count with every part but the layout's prefix. A
        row whose window has no token of the part gets 0, and without sinks the LSE -inf.
        """

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        """Output [R, H, D] and LSE [R, H] of two partial parts of the same R rows -> attention over both: `output`,
        filled, [R, H, D], contiguous, in any dtype. Computed in float32. An LSE of -inf means that the row sees no
        token of that part."""


class WindowTables:
    """The blocks of each group with windows, for every block of tables."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.blocks: NDArray[np.int32] = np.zeros((num_groups, num_blocks), np.int32)
        """[groups, blocks]; 0, the padding block, or a block that is not these tokens' any more, for tokens that no
        layer sees."""

    def place(self, windows: WindowBlocks) -> None:
        self.blocks[:, windows.blocks] = windows.own.T

    def of(self, group: int, blocks: Tensor) -> Tensor:
        """The blocks of a group, 0 for the blocks of tables themselves. blocks: of tables, on the host, any dtype."""
        return blocks if group == 0 else torch.from_numpy(self.blocks[group - 1])[blocks.long()].to(blocks.dtype)


def allocate_apart(backend: "AttentionBackend", shape: KVShape, num_blocks: int) -> None:
    """Allocate a cache in which all groups have blocks of their own for the first num_blocks blocks of tables."""
    backend.allocate(num_blocks * (1 + shape.num_groups))
    if shape.num_groups:
        blocks = np.arange(num_blocks, dtype=np.int32)
        own = blocks[:, None] + np.arange(1, 1 + shape.num_groups, dtype=np.int32) * num_blocks
        backend.place_windows(WindowBlocks(blocks, own.astype(np.int32)))


class TensorCache(ABC):
    """The KV cache of a backend in two tensors of torch. A backend states their layout."""

    computes_groups = True
    _shape: KVShape
    _keys: Tensor
    _values: Tensor
    _windows = WindowTables(0, 0)

    @abstractmethod
    def _cache_size(self, num_blocks: int) -> tuple[int, ...]:
        """Size of the keys' tensor, and of the values'."""

    @property
    def caches(self) -> list[Tensor]:
        return [self._keys, self._values]

    def allocate(self, num_blocks: int) -> None:
        size, shape = self._cache_size(num_blocks), self._shape
        self._windows = WindowTables(shape.num_groups, num_blocks)
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def place_windows(self, windows: WindowBlocks) -> None:
        self._windows.place(windows)

    def touch_in_background(self, _num_threads: int, /) -> list[threading.Thread]:
        return []

    def give_back(self) -> None:
        for cache in self.caches:
            cache.untyped_storage().resize_(0)

    def take_again(self) -> None:
        for cache in self.caches:
            cache.untyped_storage().resize_(cache.nbytes)
            cache.zero_()


@runtime_checkable
class LayoutBackend(Protocol):
    """A backend that combines the parts of a layout itself, faster than the shared code."""

    def attend_layout(self, query: Tensor, layer_index: int, layout: PagedLayout) -> Tensor:
        """query [T, H, D] of the planned layout -> [T, H, D]; 0 for padding."""


class RecordedMemory(NamedTuple):
    """Memory of a backend's recorded launches, for up to R rows, each a segment of its own: see BlockLists."""

    kv_indices: Tensor
    """int64 [R]."""

    starts: Tensor
    """int32 [R + 1]."""

    blocks: Tensor
    """int32 [R * blocks of the longest sequence]; empty if the backend reads no lists."""

    last_lengths: Tensor
    """int32 [R]."""

    @classmethod
    def allocate(cls, max_rows: int, max_blocks: int, device: torch.device) -> "RecordedMemory":
        """max_blocks: of the longest sequence."""
        starts, blocks, last_lengths = (
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (max_rows + 1, max_rows * max_blocks, max_rows)
        )
        return cls(torch.zeros(max_rows, dtype=torch.int64, device=device), starts, blocks, last_lengths)

    def cut(self, num_rows: int) -> "RecordedMemory":
        """The first rows, in the same memory."""
        return RecordedMemory(
            self.kv_indices[:num_rows], self.starts[: num_rows + 1], self.blocks, self.last_lengths[:num_rows]
        )


@runtime_checkable
class RecordableBackend(Protocol):
    """A backend whose write and attend can be recorded for decode steps, and replayed for others of the same number of
    rows."""

    def prepare_recording(self, max_rows: int, max_blocks: int) -> RecordedMemory:
        """Allocate what recorded launches read.

        max_blocks: of the longest sequence. Replaces what an earlier call allocated, and recordings that read it.
        """

    def prepare_groups(self, max_groups: int) -> RecordedMemory:
        """Allocate what recordings with prefix groups read besides, of each group's shared prefix. prepare_recording
        comes first. Replaces what an earlier call allocated; 0 groups: there are no such recordings."""

    def plan_recorded(self, layout: PagedLayout) -> None:
        """Plan a decode step before it is recorded, or before a recording is replayed for it.

        layout: one part with as many rows as the recording, each row a segment of its own. The layout's kv indices and
        its block lists, if it has any, are in the memory that `prepare_recording` has returned; see
        block_lists.in_recorded. The lists of its prefix are in the memory of `prepare_groups`: a recording with prefix
        groups has a fixed number of segments there, of which the last may have no rows and no tokens. The rows after
        theirs are in no group; none are when a step is recorded."""


def output_of(query: Tensor, part: PagedPart, output: Tensor | None) -> Tensor:
    """Memory for the output of `AttentionBackend.attend`: `output`, or new memory, in float32 for a partial part."""
    if output is not None:
        return output
    return torch.empty(query.shape, dtype=torch.float32 if part.is_partial else query.dtype, device=query.device)


_AS_ZERO = 1e-30
"""Scales below this are 0 in an int8 cache."""


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values x [..., D] converted to the cache's dtype.

    Values beyond the range of float16 are clamped to it: an infinite one would corrupt every row that attends to it.
    For int8, the float32 numbers that codes and scales stand for: code * scale, with codes from -127 to 127, and as
    the scale the largest magnitude of D / 127, rounded up to bfloat16 so that no code is larger.
    """
    if dtype == torch.int8:
        x = x.float()
        least = (x.abs().amax(dim=-1, keepdim=True) / 127).contiguous().view(torch.int32)
        scale = ((least + 0xFFFF) >> 16 << 16).view(torch.float32)
        return torch.where(least.view(torch.float32) < _AS_ZERO, 0, (x / scale).round() * scale)
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        x = x.float().clamp(limits.min, limits.max)  # bfloat16 would round the limits to 65536, beyond the range
    return x.to(dtype)
