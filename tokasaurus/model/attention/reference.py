"""Attention in plain torch, one row at a time: slow and obvious, the oracle that tests the other backends."""

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
from tokasaurus.model.attention.row_split import merge_partial

# T tokens, H query heads, K key/value heads, D head size, L tokens in a segment's blocks


class ReferenceBackend(TensorCache):
    """KV cache as [layers, tokens, K, D]; scores and sums in float32."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape

    def _cache_size(self, num_blocks: int) -> tuple[int, ...]:
        shape = self._shape
        return (
            shape.block_layers or shape.num_layers,
            num_blocks * shape.page_size,
            shape.num_kv_heads,
            shape.head_dim,
        )

    def plan(self, layout: PagedLayout) -> None:
        self._kv_indices = layout.kv_indices
        self._layout = layout

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        group, number = self._shape.place_of(layer_index)
        page_size = self._shape.page_size
        blocks = self._windows.of(group, self._kv_indices // page_size)
        kv_indices = blocks * page_size + self._kv_indices % page_size
        self._keys[number, kv_indices] = as_stored(key, self._shape.dtype)
        self._values[number, kv_indices] = as_stored(value, self._shape.dtype)

    def attend(
        self, query: Tensor, layer_index: int, part: PagedPart, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        output = output_of(query, part, output)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        scores, after = self._shape.scores_of(layer_index), tokens_after(self._layout, part)
        if part is self._layout.prefix:  # sinks count once
            scores = scores._replace(sinks=None)
        for segment in range(len(part.kv_lengths)):
            start, end = part.query_starts[segment : segment + 2].tolist()
            kv_length = int(part.kv_lengths[segment])
            key, value = self._gather(layer_index, _blocks_of(part, segment), kv_length)
            for row in range(start, end):
                visible = kv_length - (end - 1 - row) if part.causal else kv_length
                first = 0 if scores.window is None else max(0, first_seen(visible + int(after[row]), scores.window))
                seen = slice(min(first, visible), visible)
                output[row], lse[row] = self._attend_one(query[row], key[seen], value[seen], scores)
        return output, lse

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        return merge_partial(first, second, output)

    def _gather(self, layer_index: int, block_table: Tensor, kv_length: int) -> tuple[Tensor, Tensor]:
        """-> key and value [L, H, D] in float32, each KV head repeated for its query heads."""
        group, number = self._shape.place_of(layer_index)
        tokens = torch.arange(kv_length)
        page_size = self._shape.page_size
        block_table = self._windows.of(group, block_table)
        kv_indices = block_table[tokens // page_size] * page_size + tokens % page_size
        repeats = self._shape.num_heads // self._shape.num_kv_heads
        key = self._keys[number, kv_indices].float().repeat_interleave(repeats, dim=1)
        value = self._values[number, kv_indices].float().repeat_interleave(repeats, dim=1)
        return key, value

    @staticmethod
    def _attend_one(query: Tensor, key: Tensor, value: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
        """query [H, D], key and value [L, H, D] -> output [H, D] and lse [H] in float32."""
        scores = torch.einsum("hd,lhd->hl", query.float(), key) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.sinks is not None:
            scores = torch.cat((scores, how.sinks.to(scores.device).unsqueeze(1)), dim=1)
        weights = scores.softmax(dim=-1)[:, : len(key)]
        return torch.einsum("hl,lhd->hd", weights, value), scores.logsumexp(dim=-1)


def _blocks_of(part: PagedPart, segment: int) -> Tensor:
    """int32, at least as many blocks as the segment has."""
    if part.lists is not None:
        start, end = part.lists.host_starts[segment : segment + 2].tolist()
        return part.lists.blocks[start:end]
    assert part.block_table is not None
    return part.block_table[segment]
