"""The interface between the model and a paged-attention implementation.

A backend owns the layout of its KV cache. It knows nothing of requests or of prefill and decode: it attends the query
rows of a `PagedPart` to the blocks of that part. Cutting a forward into parts is shared code (row_split).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# T tokens in this forward, H query heads, K key/value heads, D head size, S segments, B blocks of the longest segment


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one worker's KV cache holds: its layers and its KV heads only.

    dtype: of the cache. activation_dtype: of queries, keys and values as they come, and of outputs; None: the same.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    activation_dtype: torch.dtype | None = None

    @property
    def query_dtype(self) -> torch.dtype:
        return self.dtype if self.activation_dtype is None else self.activation_dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `page_size` tokens in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.page_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedPart:
    """Consecutive query rows of a forward, in S segments, each against its own list of blocks. Its tensors are on the
    host, for a backend's plan to read.

    first_row, num_rows: the part's rows of the forward's T.
    query_starts: int32 [S + 1], relative to first_row: segment s has rows query_starts[s] : query_starts[s + 1].
    block_table: int32 [S, B]. kv_lengths: int32 [S], tokens to attend to; what lies behind them in the segment's blocks
    may be anything finite, and a block behind them may be one that is not filled yet, or 0. Segments may share blocks.
    causal: a segment's last row sees all its kv_lengths tokens, the row before it one less, and so on; otherwise every
    row sees all of them (a shared prefix).
    is_partial: the part holds only some of what its rows attend to: its output stays float32, to be merged with the
    others'.
    """

    first_row: int
    num_rows: int
    query_starts: Tensor
    block_table: Tensor
    kv_lengths: Tensor
    causal: bool
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where the tokens of one forward live.

    kv_indices: int64 [T], the place of each token's key and value: block id * page_size + offset in the block.
    parts: cover the first rows of T in order; those behind them are padding.
    prefix: of the rows of parts[0], a segment for each group of rows that share a prefix; parts[0] is then what each
    row attends to behind it, and both are partial. None where no rows do.
    """

    kv_indices: Tensor
    parts: tuple[PagedPart, ...]
    prefix: PagedPart | None = None


class AttentionBackend(Protocol):
    """One worker's KV cache and attention over it. Calls come in this order: allocate once; then per forward plan, and
    per layer write and attend."""

    def allocate(self, num_blocks: int) -> None:
        """Make the cache, all zeros; block 0 is the padding block. Replaces an earlier cache.

        Raises OSError or RuntimeError where there is not that much memory."""

    def plan(self, layout: PagedLayout) -> None:
        """Prepare for the layers of one forward."""

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        """Store key and value [T, K, D] at the planned layout's kv_indices."""

    def attend(self, query: Tensor, layer_index: int, part: PagedPart) -> tuple[Tensor, Tensor]:
        """query [num_rows, H, D] of a planned part -> output [num_rows, H, D], in the query's dtype or, of a partial
        part, in float32; and the natural logarithm of the sum of exponentiated scores, float32 [num_rows, H]. Scores
        are scaled by D ** -0.5."""

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """Output [R, H, D] and lse [R, H] of two partial parts of the same R rows -> attention over both, [R, H, D] in
        dtype, computed in float32. An lse of -inf: the row sees nothing of that part."""


@runtime_checkable
class LayoutBackend(Protocol):
    """A backend that puts the parts of a layout together itself, faster than shared code could."""

    def attend_layout(self, query: Tensor, layer_index: int, layout: PagedLayout) -> Tensor:
        """query [T, H, D] of the planned layout -> [T, H, D]; 0 for padding."""


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the cache's dtype. What float16 cannot hold becomes its largest number: an infinite one would
    spoil all that attend to it."""
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        x = x.clamp(limits.min, limits.max)
    return x.to(dtype)
