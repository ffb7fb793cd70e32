"""Paged attention with stock torch operations, on any device: gather the blocks, multiply, mask.

Segments of similar length are gathered and padded together, so that a batch takes only a few large gemms.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import (
    KVShape,
    PagedLayout,
    PagedPart,
    Scores,
    TensorCache,
    as_stored,
    first_seen,
    output_of,
    tokens_after,
)
from tokasaurus.model.attention.block_lists import padded_tables
from tokasaurus.model.attention.row_split import merge_partial
from tokasaurus.model.staging.staging import DirectStaging
from tokasaurus.model.triton_choice import uses_triton

# T tokens, S segments in a bucket, H query heads, K key/value heads, G = H / K, D head size, B blocks, P page size,
# L = B * P tokens of KV, Q query rows of a segment

_MAX_SCORES = 2**26
"""Most float32 attention scores in memory at once (256 MiB): bounds the memory of long prefills."""

_MAX_GATHERED = 2**27
"""Most elements of keys, and of values, gathered at once: bounds the memory of many long decodes."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments padded to one number of blocks and one number of query rows; tensors are on the device."""

    block_table: Tensor
    """int64 [S * B]."""

    rows: Tensor
    """int64 [S, Q], indices into the part's rows, padded with row 0 of the part."""

    valid: Tensor
    """int64 [N], indices of the S * Q entries that are not padding."""

    visible: Tensor
    """int64 [S, Q], number of KV tokens that each row sees, counted from the bucket's first block; with a window, less
    `first`."""

    first: Tensor | None
    """int64 [S, Q], first token that each row sees; None without a window."""


class TorchBackend(TensorCache):
    """KV cache as [layers, K, blocks, P, D]: gathering the blocks of one head gives an operand of a batched gemm."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._buckets: dict[tuple[int, int | None, int], list[_Bucket]] = {}
        """By the part's id, a layer's window and its group."""

    def _cache_size(self, num_blocks: int) -> tuple[int, ...]:
        shape = self._shape
        return (shape.block_layers or shape.num_layers, shape.num_kv_heads, num_blocks, shape.page_size, shape.head_dim)

    def plan(self, layout: PagedLayout) -> None:
        self._staging = layout.staging or DirectStaging(self._shape.device)
        self._layout = layout  # keeps the parts alive: _buckets is keyed by their ids
        parts = layout.parts if layout.prefix is None else (*layout.parts, layout.prefix)
        shape = self._shape
        kinds = {(shape.scores_of(index).window, shape.place_of(index).group) for index in range(shape.num_layers)}
        self._buckets = {
            (id(part), window, group): self._make_buckets(part, tokens_after(layout, part), window, group)
            for part in parts
            for window, group in kinds
        }
        self._kv_indices = {group: self._indices_of(group, layout.kv_indices) for _, group in kinds}

    def _indices_of(self, group: int, kv_indices: Tensor) -> Tensor:
        """kv indices, where the group's blocks are."""
        if group == 0:
            return kv_indices
        page_size = self._shape.page_size
        return self._windows.of(group, kv_indices // page_size) * page_size + kv_indices % page_size

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        shape = self._shape
        group, number = shape.place_of(layer_index)
        keys, values = (
            cache[number].view(shape.num_kv_heads, -1, shape.head_dim) for cache in (self._keys, self._values)
        )
        if uses_triton(shape.device, "attention"):
            from tokasaurus.model.attention import triton_kernels

            by_token = keys.transpose(0, 1), values.transpose(0, 1)
            triton_kernels.write_kv(*by_token, key, value, self._kv_indices[group], shape.page_size)
            return
        for tokens, new in ((keys, key), (values, value)):
            tokens[:, self._kv_indices[group]] = as_stored(new.transpose(0, 1), tokens.dtype)

    def attend(
        self, query: Tensor, layer_index: int, part: PagedPart, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        output = output_of(query, part, output)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        scores = self._shape.scores_of(layer_index)
        if part is self._layout.prefix:  # sinks count once
            scores = scores._replace(sinks=None)
        group, number = self._shape.place_of(layer_index)
        for bucket in self._buckets[id(part), scores.window, group]:
            rows = bucket.rows.flatten()[bucket.valid]
            bucket_output, bucket_lse = self._attend_bucket(query[bucket.rows], number, bucket, scores)
            output[rows] = bucket_output.flatten(0, 1)[bucket.valid].to(output.dtype)
            lse[rows] = bucket_lse.flatten(0, 1)[bucket.valid]
        return output, lse

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        if uses_triton(self._shape.device, "attention"):
            from tokasaurus.model.attention import triton_kernels

            return triton_kernels.merge_partial(first, second, output)
        return merge_partial(first, second, output)

    def _attend_bucket(self, query: Tensor, place: int, bucket: _Bucket, how: Scores) -> tuple[Tensor, Tensor]:
        """query [S, Q, H, D] -> output [S, Q, H, D] and lse [S, Q, H], both float32. place: of the layer in a block."""
        num_segments, num_rows, num_heads, head_dim = query.shape
        num_kv_heads = self._shape.num_kv_heads
        group = num_heads // num_kv_heads
        key, value = (
            cache[place].index_select(1, bucket.block_table).view(num_kv_heads * num_segments, -1, head_dim)
            for cache in (self._keys, self._values)
        )
        # [S, Q, K, G, D] -> [K, S, G, Q, D] -> [K * S, G * Q, D]
        grouped = query.view(num_segments, num_rows, num_kv_heads, group, head_dim).permute(2, 0, 3, 1, 4)
        grouped = grouped.reshape(num_kv_heads * num_segments, group * num_rows, head_dim)
        # [K * S, G * Q, L]. Scaled in float32: D ** -0.5 is exact in bfloat16 only where D is a power of 4.
        scores = _bmm_in_float32(grouped, key.to(query.dtype).transpose(1, 2)).mul_(how.scale)
        if how.softcap is not None:
            scores.div_(how.softcap).tanh_().mul_(how.softcap)
        positions = torch.arange(key.shape[1], device=query.device)
        hidden = positions >= bucket.visible.unsqueeze(-1)  # [S, Q, L]
        if bucket.first is not None:
            hidden |= positions < bucket.first.unsqueeze(-1)
        scores = scores.view(num_kv_heads, num_segments, group, num_rows, -1)
        scores.masked_fill_(hidden.unsqueeze(1).unsqueeze(0), -torch.inf)
        lse = scores.logsumexp(dim=-1)  # [K, S, G, Q]
        if how.sinks is not None:
            lse = torch.logaddexp(lse, how.sinks.view(num_kv_heads, 1, group, 1))
        # The clamp is for rows that see no token: their weights are 0, not NaN.
        lowest = torch.finfo(torch.float32).min
        weights = scores.sub_(lse.clamp_min(lowest).unsqueeze(-1)).exp_().view(*grouped.shape[:2], -1)
        output = _bmm_in_float32(weights, value.to(query.dtype))
        output = output.view(num_kv_heads, num_segments, group, num_rows, head_dim)
        return (
            output.permute(1, 3, 0, 2, 4).reshape(num_segments, num_rows, num_heads, head_dim),
            lse.permute(1, 3, 0, 2).reshape(num_segments, num_rows, num_heads),
        )

    def _make_buckets(self, part: PagedPart, after: Tensor, window: int | None, group: int) -> list[_Bucket]:
        """Sort segments by length, longest first; a bucket's shortest is at least half as long as its longest.

        after: as of tokens_after. window: segments are as long as their rows' windows together."""
        starts = part.query_starts.tolist()
        lengths = part.kv_lengths.tolist()
        num_rows = [end - start for start, end in itertools.pairwise(starts)]
        if window is not None:
            most = abs(window) + self._shape.page_size  # a window begins anywhere in a block
            lengths = [min(length, rows + most) for length, rows in zip(lengths, num_rows, strict=True)]
        order = sorted(range(len(lengths)), key=lambda segment: (num_rows[segment], lengths[segment]), reverse=True)
        buckets: list[_Bucket] = []
        members: list[int] = []
        max_rows = longest = shortest = 0  # of the members
        for segment in order:
            rows, length = num_rows[segment], lengths[segment]
            if members:
                longest, shortest = max(longest, length), min(shortest, length)
                is_similar = 2 * rows >= max_rows and longest <= 2 * shortest
                if not is_similar or not self._fits((len(members) + 1) * longest, max_rows):
                    buckets += self._pad(part, members, starts, lengths, after, window, group)
                    members = []
            if not members:
                max_rows, longest, shortest = rows, length, length
            members.append(segment)
        return buckets + self._pad(part, members, starts, lengths, after, window, group)

    def _fits(self, num_tokens: int, num_rows: int) -> bool:
        """num_tokens: of KV in a bucket, with padding. num_rows: of each of its segments."""
        scores = num_tokens * num_rows * self._shape.num_heads
        gathered = num_tokens * self._shape.num_kv_heads * self._shape.head_dim
        return scores <= _MAX_SCORES and gathered <= _MAX_GATHERED

    def _pad(
        self,
        part: PagedPart,
        members: list[int],
        starts: list[int],
        lengths: list[int],
        after: Tensor,
        window: int | None,
        group: int,
    ) -> list[_Bucket]:
        """One bucket of these segments, or several of consecutive rows if one segment alone has too many scores."""
        staging = self._staging
        index = torch.tensor(members)
        longest = max(lengths[member] for member in members)
        first = part.query_starts[index].long()
        count = part.query_starts[index + 1].long() - first
        max_rows = max(starts[member + 1] - starts[member] for member in members)
        rows_at_once = max(1, _MAX_SCORES // (len(members) * self._shape.num_heads * longest))
        buckets = []
        for offset in range(0, max_rows, rows_at_once):
            offsets = torch.arange(offset, min(offset + rows_at_once, max_rows))
            is_row = offsets < count.unsqueeze(1)
            visible = part.kv_lengths[index].long().unsqueeze(1).expand(-1, len(offsets))
            if part.causal:
                visible = visible - (count.unsqueeze(1) - 1 - offsets)
            rows = (first.unsqueeze(1) + offsets).masked_fill(~is_row, 0)
            first_blocks = seen_from = None
            if window is not None:
                begin = first_seen(visible + after[rows], window).clamp_min(0)
                # Rows of a prefix begin in any order. A segment has at least one block.
                earliest = begin.masked_fill(~is_row, torch.iinfo(begin.dtype).max).amin(1)
                first_blocks = torch.minimum(earliest, visible[:, 0] - 1).clamp_min(0) // self._shape.page_size
                visible = visible - first_blocks.unsqueeze(1) * self._shape.page_size
                begin = (begin - first_blocks.unsqueeze(1) * self._shape.page_size).masked_fill(~is_row, 0)
                seen_from = staging.to_device(begin.numpy())
            # A padding row sees one token, so that its softmax is finite; its result is dropped.
            visible = visible.masked_fill(~is_row, 1)
            num_blocks = -(-int(visible.max()) // self._shape.page_size)  # early rows of a long prefill see few tokens
            table = self._windows.of(group, padded_tables(part, index, num_blocks, staging, first_blocks))
            valid = is_row.flatten().nonzero().squeeze(1)
            on_device = [staging.to_device(x.numpy()) for x in (rows, valid, visible)]
            buckets.append(_Bucket(table, *on_device, seen_from))  # type: ignore[call-arg]
        return buckets


def _bmm_in_float32(first: Tensor, second: Tensor) -> Tensor:
    """first [N, I, J] @ second [N, J, L] -> float32 [N, I, L], never rounded to the dtype of an operand.

    On CUDA, first is rounded to second's dtype: the product of 16-bit operands is many times faster there.
    """
    if second.device.type == "cuda" and second.dtype != torch.float32:
        return torch.bmm(first.to(second.dtype), second, out_dtype=torch.float32)
    return torch.bmm(first.float(), second.float())  # a CPU's bmm has no out_dtype
