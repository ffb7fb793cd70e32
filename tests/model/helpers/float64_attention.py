"""Attention in float64, one row and one head at a time, over a cache of seeded random keys and values."""

import torch

from tests.model.helpers.paged_problems import Segment, make_part, scattered_tables
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.choose import make_backend

# T tokens of KV in all segments, R query rows, H query heads, K key/value heads, D head size


def attention_beside_float64(
    name: str, shape: KVShape, segments: list[Segment]
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Output [R, H, D] and lse [R, H] of a causal partial part by the backend, on the CPU, and the same in float64.

    The queries are so large that the scores have a standard deviation of 4.
    """
    generator = torch.Generator().manual_seed(0)
    tables, num_blocks = scattered_tables(segments, shape.page_size, seed=1)
    num_tokens = sum(segment.kv_length for segment in segments)
    size = (num_tokens, shape.num_kv_heads, shape.head_dim)
    key, value = (torch.randn(size, generator=generator).to(shape.query_dtype) for _ in range(2))
    num_rows = sum(segment.num_rows for segment in segments)
    query = 4 * torch.randn((num_rows, shape.num_heads, shape.head_dim), generator=generator)
    query = query.to(shape.query_dtype)

    part = make_part(segments, tables, first_row=0, causal=True, is_partial=True)
    kv_indices = [
        table[token // shape.page_size] * shape.page_size + token % shape.page_size
        for segment, table in zip(segments, tables, strict=True)
        for token in range(segment.kv_length)
    ]
    backend = make_backend(name, shape, None)
    backend.allocate(num_blocks)
    backend.plan(PagedLayout(torch.tensor(kv_indices, device=shape.device), (part,)))
    backend.write(key.to(shape.device), value.to(shape.device), 0)
    output, lse = backend.attend(query.to(shape.device), 0, part)
    assert lse is not None
    return (output.cpu(), lse.cpu()), _in_float64(query.double(), key.double(), value.double(), segments)


def _in_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [R, H, D], key and value [T, K, D] -> output [R, H, D] and lse [R, H]."""
    output, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    row = first_token = 0
    for segment in segments:
        for visible in range(segment.kv_length - segment.num_rows + 1, segment.kv_length + 1):
            for head in range(query.shape[1]):
                seen = slice(first_token, first_token + visible)
                scores = key[seen, head // group] @ query[row, head] / query.shape[-1] ** 0.5
                total = scores.exp().sum()
                output[row, head] = (scores.exp() / total) @ value[seen, head // group]
                lse[row, head] = total.log()
            row += 1
        first_token += segment.kv_length
    return output, lse
