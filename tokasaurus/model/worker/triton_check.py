"""A start's check of the Triton kernels: a group that does not compile, raises, or differs from plain torch is switched
off before anything else uses it.

Inputs are small, but have the sizes of this model: a check compiles the variants that steps launch.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tokasaurus.messages.generation import SAMPLING_DTYPE, SamplingParams
from tokasaurus.model.attention.backend import BlockLists, KVShape, as_stored
from tokasaurus.model.attention.block_lists import fill_lists_by_torch
from tokasaurus.model.attention.row_split import merge_partial
from tokasaurus.model.decoder.decoder import Decoder, zero_nonfinite
from tokasaurus.model.sampling.rules import (
    DeviceMasks,
    RuledRows,
    choose_rows,
    has_limits,
    limited_rows,
    num_mask_words,
    params_to_device,
)
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, TopRows, sample_by_torch, sample_by_triton
from tokasaurus.model.staging.staging import DirectStaging
from tokasaurus.model.triton_choice import KernelGroup, switch_off, uses_triton
from tokasaurus.model.worker.self_check import TOLERANCES, Checks, Measure, Measured, compared

# T tokens, K key/value heads, H query heads, D head size, E hidden size, R rows that sample, V vocabulary

_LOST: dict[KernelGroup, str] = {
    "attention": "KV writes, merging of shared prefixes and block lists take several launches each",
    "sampling": "tokens are drawn by plain torch, which sorts the vocabulary for limits and is not in CUDA graphs",
    "layers": "layers that are not compiled take over 25 launches instead of eight",
}

_OPTIONS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.1),
)
_ROWS_PER_OPTION = 4
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
_NUM_TOP = 5
_CONTEXT_TOKENS = 20


def switch_off_wrong_kernels(shape: KVShape, model: Decoder, checks: Checks) -> None:
    """Check each group of kernels that is in use here."""
    for group, measure in measures(shape, model).items():
        what = f"the Triton kernels of {group} are"
        without = f"without them, {_LOST[group]}. Triton needs a C compiler"
        if not checks.passes(f"triton_{group}", measure, what, without):
            switch_off(group)


def measures(shape: KVShape, model: Decoder) -> dict[KernelGroup, Measure]:
    """The check of each group of kernels that is in use on this device."""
    every: dict[KernelGroup, Measure] = {
        "attention": functools.partial(compare_attention, shape),
        "sampling": functools.partial(
            compare_sampling, model.vocab_size, model.activation_dtype, shape.device, sample_by_triton
        ),
        "layers": functools.partial(compare_layers, model),
    }
    return {group: measure for group, measure in every.items() if uses_triton(shape.device, group)}


def compare_attention(shape: KVShape) -> Iterator[Measured]:
    from tokasaurus.model.attention import triton_kernels

    device, page_size = shape.device, shape.page_size
    num_heads, head_dim = shape.num_kv_heads, shape.head_dim
    random = _Random(device)
    tolerance = max(TOLERANCES[shape.dtype], TOLERANCES[shape.query_dtype])
    # New keys and values as the projections give them: slices of one tensor. One token is padding.
    heads = random.normal((3, 2 * num_heads, head_dim), shape.query_dtype)
    key, value = heads[:, :num_heads], heads[:, num_heads:]
    kv_indices = torch.tensor([3 * page_size - 1, page_size, 0], device=device)
    for is_by_head in (False, True):
        size = (2, num_heads, 3 * page_size, head_dim) if is_by_head else (2, 3 * page_size, num_heads, head_dim)
        cache = torch.zeros(size, dtype=shape.dtype, device=device)
        by_token = cache.transpose(1, 2) if is_by_head else cache
        expected = by_token.clone()
        triton_kernels.write_kv(by_token[0], by_token[1], key, value, kv_indices, page_size)
        for index, new in enumerate((key, value)):
            expected[index][kv_indices[:2]] = as_stored(new[:2], shape.dtype)
        yield compared("write_kv", by_token, expected, tolerance)

    for dtype in dict.fromkeys((torch.float32, shape.query_dtype)):
        outputs = [random.normal((5, shape.num_heads, head_dim), dtype) for _ in range(2)]
        lses = [3 * random.normal((5, shape.num_heads), torch.float32) for _ in range(2)]
        lses[0][1:3], lses[1][2:4] = -torch.inf, -torch.inf
        first, second = zip(outputs, lses, strict=True)
        # The merged rows are the first ones of the forward, which may have more.
        found, expected = (
            torch.zeros_like(outputs[0][:1].expand(7, -1, -1), dtype=shape.query_dtype) for _ in range(2)
        )
        triton_kernels.merge_partial(first, second, found[:5])
        merge_partial(first, second, expected[:5])
        yield compared("merge_partial", found, expected, tolerance)

    lengths = torch.tensor([3 * page_size, 1, 2 * page_size + 1, 0], dtype=torch.int32, device=device)
    tables = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    first_entries = torch.tensor([10, 3, 31, 0], device=device)
    ours, plain = (_empty_lists(lengths, [0, 3, 4, 7, 7]) for _ in range(2))
    triton_kernels.fill_lists(tables, first_entries, page_size, ours)
    fill_lists_by_torch(tables, first_entries, page_size, plain)
    for name in ("starts", "blocks", "last_lengths"):
        yield compared(f"fill_lists ({name})", getattr(ours, name), getattr(plain, name), 0)


def compare_sampling(
    vocab_size: int, dtype: torch.dtype, device: torch.device, sampler: Callable[[Tensor, SamplingRows], Sampled]
) -> Iterator[Measured]:
    """dtype: of logits. sampler: compared with `sample_by_torch`."""
    random = _Random(device)
    num_rows = len(_OPTIONS) * _ROWS_PER_OPTION
    logits = 2 * random.normal((num_rows, vocab_size), dtype)
    peaks = random.integers((num_rows, 1), vocab_size)
    logits.scatter_(1, peaks, 12)  # so that greedy rows do not tie
    logits[-1, vocab_size // 2] = torch.nan
    params = np.repeat(np.array([*_OPTIONS], SAMPLING_DTYPE), _ROWS_PER_OPTION)
    for name, penalty in _PENALTIES.items():
        params[name] = penalty
    staging = DirectStaging(device)
    rows = SamplingRows(
        params=params,
        device_params=params_to_device(params, device),
        noise_keys=random.integers((num_rows, 2), 2**32),
        any_logprobs=True,
        limited=limited_rows(has_limits(params), staging),
        top=TopRows(choose_rows(np.arange(0, num_rows - 1, 3), staging), min(_NUM_TOP, vocab_size)),
    )
    yield from _compare_draws("sampling", logits, rows, sampler)
    # Contexts of each second row's largest logits, so that penalties and biases change what is drawn.
    ruled = choose_rows(np.arange(1, num_rows, 2), staging)
    count = len(ruled.on_host)
    num_context = min(_CONTEXT_TOKENS, vocab_size)
    tokens = logits[ruled.on_device].nan_to_num(0).topk(num_context).indices.int()
    bias_starts = np.arange(count + 1)
    lengths = torch.full((count,), num_context, dtype=torch.int32, device=device)
    rules = RuledRows(
        rows=ruled,
        tokens=tokens.flatten(),
        page_size=num_context,
        block_tables=torch.arange(count, dtype=torch.int32, device=device).unsqueeze(1),
        lengths=lengths,
        num_request_tokens=lengths // 2,
        bias_starts=bias_starts,
        device_bias_starts=torch.from_numpy(bias_starts).to(device),
        bias_ids=tokens[:, 0].contiguous(),
        bias_values=torch.full((count,), -5.0, device=device),
    )
    masked = choose_rows(np.arange(0, num_rows, 3), staging)
    bits = random.integers((len(masked.on_host), num_mask_words(vocab_size)), 2**31).int()
    bits[:, 0] |= 1  # at least one token is allowed
    changed = dataclasses.replace(rows, rules=rules, masks=DeviceMasks(masked, bits))
    yield from _compare_draws("sampling with penalties, biases and masks", logits, changed, sampler)


def _compare_draws(
    name: str, logits: Tensor, rows: SamplingRows, sampler: Callable[[Tensor, SamplingRows], Sampled]
) -> Iterator[Measured]:
    found, expected = sampler(logits, rows), sample_by_torch(logits, rows)
    differs = found.tokens != expected.tokens
    # In one row, a near tie may go the other way.
    yield Measured(f"{name} (share of tokens)", float(differs.double().mean()), 1 / len(differs))
    is_same = ~differs & (expected.tokens >= 0)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    tolerance = TOLERANCES[torch.float32]
    yield compared(f"{name} (logprobs)", found.logprobs[is_same], expected.logprobs[is_same], tolerance)
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert expected.top_ids is not None
    assert expected.top_logprobs is not None
    assert rows.top is not None
    yield compared(f"{name} (top_logprobs)", found.top_logprobs, expected.top_logprobs, tolerance)
    own = logits[rows.top.rows.on_device]  # of equal logits, either token may come first
    of_ids, of_expected = (own.gather(1, ids.long()) for ids in (found.top_ids, expected.top_ids))
    yield compared(f"{name} (top_ids)", of_ids, of_expected, 0)


def compare_layers(model: Decoder) -> Iterator[Measured]:
    from tokasaurus.model.decoder import triton_layers

    layer = next(iter(model.decoder_layers()))
    attention, norm, mlp_norm = layer.attention, layer.attention_norm, layer.mlp_norm
    dtype = norm.weight.dtype
    tolerance = TOLERANCES[dtype]
    random = _Random(model.device)
    heads = attention.num_heads, attention.num_kv_heads
    features = random.normal((4, (heads[0] + 2 * heads[1]) * model.head_dim), dtype)
    features[2, -1] = torch.inf
    angles = 9 * random.normal((4, 1, model.head_dim // 2), torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights, eps = None, 0.0
    if attention.query_norm is not None and attention.key_norm is not None:
        weights, eps = (attention.query_norm.weight, attention.key_norm.weight), attention.query_norm.eps
    *found, poison = triton_layers.rotate_heads(features, cos_sin, *heads, weights, eps)
    query, key, value = attention.split_heads(attention.heads(features), cos_sin)
    key, value, is_finite = zero_nonfinite(key, value)
    for name, ours, plain in zip(("query", "key", "value"), found, (query, key, value), strict=True):
        yield compared(f"rotate_heads ({name})", ours, plain, tolerance)
    expected_poison = torch.where(is_finite, 0.0, torch.nan)
    yield compared("rotate_heads (poison)", poison, expected_poison, 0)

    hidden, addend = (random.normal((4, model.hidden_size), dtype) for _ in range(2))
    yield compared("add_norm", triton_layers.add_norm(hidden, None, norm.weight, norm.eps), norm(hidden), tolerance)
    for given in (None, expected_poison):
        total = hidden.clone()
        normed = triton_layers.add_norm(total, addend, mlp_norm.weight, mlp_norm.eps, given)
        expected = hidden + addend
        if given is not None:
            expected = torch.where(is_finite[:, None], expected, torch.nan)
        yield compared("add_norm (sum)", total, expected, tolerance)
        yield compared("add_norm (norm)", normed, mlp_norm(expected), tolerance)
    gate_up = random.normal((4, 2 * layer.mlp.gate_up.length), dtype)
    yield compared("silu_mul", triton_layers.silu_mul(gate_up), layer.mlp.gate_up.activate(gate_up), tolerance)


class _Random:
    """The same numbers on every device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self._device, dtype)

    def integers(self, size: tuple[int, ...], end: int) -> Tensor:
        """int64, from 0 to before `end`."""
        return torch.randint(end, size, generator=self._generator).to(self._device)


def _empty_lists(kv_lengths: Tensor, starts: list[int]) -> BlockLists:
    """starts: of each segment's blocks, and the end of the last."""
    size = {"starts": len(starts), "blocks": starts[-1], "last_lengths": len(kv_lengths)}
    empty = {name: kv_lengths.new_full((length,), -1) for name, length in size.items()}
    host_starts = torch.tensor(starts, dtype=torch.int32)
    query_starts = torch.arange(len(starts), dtype=torch.int32, device=kv_lengths.device)
    return BlockLists(host_starts, query_starts=query_starts, kv_lengths=kv_lengths, **empty)
