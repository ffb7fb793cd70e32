"""Random cases for the Triton kernels of attention, on any device where they run, each with a slow oracle."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from tokasaurus.model.attention import triton_kernels
from tokasaurus.model.attention.backend import BlockLists, as_stored
from tokasaurus.model.attention.block_lists import fill_lists_by_torch
from tokasaurus.model.attention.row_split import count_sinks, merge_partial

# T tokens, K key/value heads, D head size, P page size, R rows, H query heads, S segments

Part = tuple[Tensor, Tensor]


def check_write(
    seed: int, device: torch.device, size: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """size: T, K, D. A third of the tokens are padding; the cache is head by head or token by token."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_heads, head_dim = size
    page_size, num_blocks = 5, num_tokens // 5 + 3
    # New keys and values as the projections give them: slices of one tensor.
    heads = (
        10.0 ** torch.randint(-6, 7, (num_tokens, 2 * num_heads + 1, head_dim), generator=generator)
    ) * torch.randn(num_tokens, 2 * num_heads + 1, head_dim, generator=generator)
    heads[torch.rand(heads.shape, generator=generator) < 0.01] = torch.nan
    heads[torch.rand(heads.shape, generator=generator) < 0.01] = torch.inf
    heads = heads.to(dtype)
    key, value = heads[:, 1 : num_heads + 1], heads[:, num_heads + 1 :]
    places = torch.randperm((num_blocks - 1) * page_size, generator=generator)[:num_tokens] + page_size
    places[::3] = torch.randint(-7, page_size, places[::3].shape, generator=generator)

    before = torch.randn(2, num_blocks * page_size, num_heads, head_dim, generator=generator).to(cache_dtype)
    expected = before.clone()
    for token, place in enumerate(places.tolist()):
        if place >= page_size:
            expected[0, place], expected[1, place] = (as_stored(x[token], cache_dtype) for x in (key, value))
    for by_head in (False, True):
        cache = before.transpose(1, 2).contiguous().transpose(1, 2) if by_head else before
        cache = cache.clone().to(device)
        new_key, new_value = (x.to(device) for x in (heads[:, 1 : num_heads + 1], value))
        triton_kernels.write_kv(cache[0], cache[1], new_key, new_value, places.to(device), page_size)
        torch.testing.assert_close(cache.cpu(), expected, atol=0, rtol=0, equal_nan=True)


def attend(scores: Tensor, values: Tensor, seen: Tensor) -> Part:
    """scores [R, H, L] and values [L, D] in float64, seen: bool [R, H, L] -> one part, float32."""
    exponentials = torch.where(seen, scores, -torch.inf).exp()
    total = exponentials.sum(-1)
    return (exponentials / total.clamp_min(1e-300).unsqueeze(-1) @ values).float(), total.log().float()


def check_merge(seed: int, device: torch.device, size: tuple[int, int, int], offset: float) -> None:
    """size: R, H, D. A quarter of the rows' heads see nothing of the first part, of the second, and of both.
    offset: added to the scores of the second part."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_heads, head_dim = size
    scores = torch.randn(num_rows, num_heads, 12, dtype=torch.float64, generator=generator)
    scores[..., 7:] += offset
    values = torch.randn(12, head_dim, dtype=torch.float64, generator=generator)
    empty = torch.randint(0, 4, (num_rows, num_heads, 1), generator=generator)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    seen[..., :7] &= (empty != 1) & (empty != 3)
    seen[..., 7:] &= (empty != 2) & (empty != 3)
    first = attend(scores[..., :7], values[:7], seen[..., :7])
    second = attend(scores[..., 7:], values[7:], seen[..., 7:])
    expected, _ = attend(scores, values, seen)
    first, second = ((output.to(device), lse.to(device)) for output, lse in (first, second))
    # The result belongs to the middle of a larger tensor.
    whole = torch.full((num_rows + 3, num_heads, head_dim), 7.0, device=device)
    merged = triton_kernels.merge_partial(first, second, whole[1 : num_rows + 1])
    assert merged.data_ptr() == whole[1:].data_ptr()
    assert (whole[:1] == 7).all()
    assert (whole[num_rows + 1 :] == 7).all()
    torch.testing.assert_close(merged, merge_partial(first, second, torch.empty_like(merged)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged.cpu(), expected, atol=1e-5, rtol=1e-5)
    in_base_2 = [(output, lse / math.log(2)) for output, lse in (first, second)]
    for merge in (triton_kernels.merge_partial, merge_partial):
        again = merge(in_base_2[0], in_base_2[1], torch.empty_like(merged), is_base_2=True)
        torch.testing.assert_close(again.cpu(), expected, atol=1e-5, rtol=1e-4)
    rounded = triton_kernels.merge_partial(first, second, torch.empty_like(merged, dtype=torch.float16))
    torch.testing.assert_close(rounded, merged.half(), atol=0, rtol=0)

    # What an unseen part holds is not read.
    for output, lse in (first, second):
        output[lse == -torch.inf] = torch.nan
    again = triton_kernels.merge_partial(first, second, torch.empty_like(merged))
    torch.testing.assert_close(again, merged, atol=0, rtol=0)
    first[1].view(-1)[:1] = torch.nan  # and a NaN is not lost
    assert triton_kernels.merge_partial(first, second, again).view(-1, head_dim)[:1].isnan().all()


def check_sinks(seed: int, device: torch.device, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """size: R, H, D. A quarter of the rows' heads see nothing. Sinks of -20 to 20: some take all the weight."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_heads, head_dim = size
    sinks = 40 * torch.rand(num_heads, generator=generator) - 20
    scores = torch.randn(num_rows, num_heads, 12, dtype=torch.float64, generator=generator)
    scores[..., 11] = sinks
    values = torch.randn(12, head_dim, dtype=torch.float64, generator=generator)
    values[11] = 0
    seen = torch.randint(0, 4, (num_rows, num_heads, 1), generator=generator).expand(scores.shape).clone() > 0
    seen[..., 11] = False
    output, lse = attend(scores, values, seen)
    seen[..., 11] = True
    expected, expected_lse = attend(scores, values, seen)
    for count in (triton_kernels.count_sinks, count_sinks):
        # Both belong to the middle of larger tensors.
        whole = torch.full((num_rows + 3, num_heads, head_dim), 7.0, dtype=dtype, device=device)
        whole_lse = torch.full((num_rows + 3, num_heads), 7.0, device=device)
        rows = slice(1, num_rows + 1)
        whole[rows], whole_lse[rows] = output.to(device, dtype), (lse / math.log(2)).to(device)
        count(whole[rows], whole_lse[rows], sinks.to(device))
        torch.testing.assert_close(whole_lse[rows].cpu() * math.log(2), expected_lse, atol=1e-5, rtol=1e-5)
        error = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(whole[rows].float().cpu(), expected, atol=error, rtol=error)
        for each in (whole, whole_lse):
            assert (each[:1] == 7).all()
            assert (each[num_rows + 1 :] == 7).all()


def check_lists(seed: int, device: torch.device, num_segments: int, page_size: int, max_blocks: int) -> None:
    """Segments that begin anywhere in the tables of random slots; some have no tokens."""
    rng = np.random.default_rng(seed)
    num_slots, width = 9, 2 * max_blocks
    tables = rng.integers(0, 2**31 - 1, (num_slots, width), dtype=np.int32)
    slots, first_blocks = rng.integers(0, num_slots, num_segments), rng.integers(0, max_blocks + 1, num_segments)
    lengths = rng.integers(0, max_blocks * page_size + 1, num_segments).astype(np.int32)
    own = [
        tables[slot, first : first + -(-length // page_size)].tolist()
        for slot, first, length in zip(slots.tolist(), first_blocks.tolist(), lengths.tolist(), strict=True)
    ]
    starts = [0, *itertools.accumulate(map(len, own))]
    last_lengths = [length - (len(ids) - 1) * page_size for length, ids in zip(lengths.tolist(), own, strict=True)]
    inputs = torch.from_numpy(tables).to(device), torch.from_numpy(slots * width + first_blocks).to(device), page_size
    for fill in (triton_kernels.fill_lists, fill_lists_by_torch):
        lists = unfilled_lists(torch.tensor(starts, dtype=torch.int32), torch.from_numpy(lengths), device)
        fill(*inputs, lists)
        assert lists.starts.tolist() == starts
        assert lists.blocks.tolist() == [block for ids in own for block in ids]
        assert lists.last_lengths.tolist() == last_lengths


def unfilled_lists(host_starts: Tensor, kv_lengths: Tensor, device: torch.device) -> BlockLists:
    """host_starts: int32 [S + 1]. kv_lengths: int32 [S]."""
    num_segments = len(kv_lengths)
    starts, last_lengths, blocks = (
        torch.full((size,), -1, dtype=torch.int32, device=device)
        for size in (num_segments + 1, num_segments, int(host_starts[-1]))
    )
    query_starts = torch.arange(num_segments + 1, dtype=torch.int32, device=device)
    return BlockLists(host_starts, starts, blocks, last_lengths, query_starts, kv_lengths.to(device))
