"""Triton kernels for the parts of decoder layers between gemms and attention, each one launch: add and norm; head
norms, rotary and the check for values that are not finite; gated activation.

The modules of `layers` do the same in plain torch, and are easier to read. Everything is computed in float32; hidden
states and what is stored are rounded to their dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, E hidden size, H query heads, K key/value heads, D head size, I intermediate size

_HEADS_BLOCK = 2048
"""Numbers of a token's queries that one program rotates, about."""

_ACTIVATION_BLOCK = 1024
"""Most numbers of a token that one program activates."""


def add_norm(hidden: Tensor, addend: Tensor | None, weight: Tensor, eps: float, poison: Tensor | None = None) -> Tensor:
    """hidden [T, E], to which addend [T, E] and poison, float32 [T], are added in place -> RMSNorm of the sum, [T, E].

    weight: [E]. poison: as from `rotate_heads`; only together with an addend.
    """
    num_tokens, size = hidden.shape
    assert hidden.stride(1) == 1
    assert poison is None or addend is not None
    assert addend is None or (addend.shape == hidden.shape and addend.stride(1) == 1)
    normed = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    if num_tokens:
        _add_norm_row[(num_tokens,)](
            *(hidden, hidden.stride(0), hidden if addend is None else addend),
            *(0 if addend is None else addend.stride(0), hidden if poison is None else poison, weight, normed, eps),
            SIZE=size,
            HAS_ADDEND=addend is not None,
            HAS_POISON=poison is not None,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
        )
    return normed


def rotate_heads(
    features: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """features [T, (H + 2K) * D] of queries, keys and values, cos_sin float32 [T, 1, D] -> query [T, H, D], key and
    value [T, K, D], and poison, float32 [T].

    Queries and keys are rotated, after RMSNorm of each head where norm_weights are given, [D] for queries and for keys.
    Where a token's key or value is not finite, both are zeros and poison is NaN; elsewhere poison is 0.
    """
    num_tokens, head_dim = len(features), cos_sin.shape[-1]
    assert features.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert features.stride(1) == 1
    assert cos_sin.is_contiguous()
    query = features.new_empty((num_tokens, num_heads, head_dim))
    key = features.new_empty((num_tokens, num_kv_heads, head_dim))
    value = torch.empty_like(key)
    poison = features.new_empty(num_tokens, dtype=torch.float32)
    columns = triton.next_power_of_2(head_dim // 2)
    heads = min(max(1, _HEADS_BLOCK // (2 * columns)), triton.next_power_of_2(num_heads))
    query_weight, key_weight = (features, features) if norm_weights is None else norm_weights
    if num_tokens:
        _rotate_token[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
            *(features, features.stride(0), cos_sin, query_weight, key_weight, query, key, value, poison, eps),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HAS_NORM=norm_weights is not None,
            HEADS=heads,
            KV_HEADS=triton.next_power_of_2(num_kv_heads),
            COLUMNS=columns,
        )
    return query, key, value, poison


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], the outputs of gate and up -> silu(gate) * up, [T, I]."""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    activated = gate_up.new_empty((num_tokens, size))
    block = min(_ACTIVATION_BLOCK, triton.next_power_of_2(size))
    if num_tokens:
        _activate_token[(num_tokens, triton.cdiv(size, block))](
            *(gate_up, gate_up.stride(0), activated), SIZE=size, BLOCK=block
        )
    return activated


@triton.jit
def _add_norm_row(
    hidden, hidden_stride, addend, addend_stride, poison, weight, normed, eps,
    SIZE: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_POISON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    row = hidden + token * hidden_stride + columns
    x = tl.load(row, mask=in_row, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        x += tl.load(addend + token * addend_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_POISON:
            x += tl.load(poison + token)
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(row, rounded, mask=in_row)
        x = tl.where(in_row, rounded.to(tl.float32), 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / SIZE + eps)
    scaled = x * scale * tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(normed + token * SIZE + columns, scaled.to(normed.dtype.element_ty), mask=in_row)


@triton.jit
def _rotate_token(
    features, token_stride, cos_sin, query_weight, key_weight, query, key, value, poison, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first program of a token has its keys and values, the others have some of its queries each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)[None, :]
    in_half = columns < HEAD_DIM // 2
    cos = tl.load(cos_sin + token * HEAD_DIM + columns, mask=in_half, other=0.0)
    sin = tl.load(cos_sin + token * HEAD_DIM + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
    source = features + token * token_stride
    if part > 0:
        query_heads = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        query_offsets = query_heads * HEAD_DIM + columns
        is_query = (query_heads < NUM_HEADS) & in_half
        first, second = _rotated(
            source, query_weight, query_offsets, columns, is_query, cos, sin, eps, HEAD_DIM, HAS_NORM
        )
        target = query + token * NUM_HEADS * HEAD_DIM + query_offsets
        tl.store(target, first.to(query.dtype.element_ty), mask=is_query)
        tl.store(target + HEAD_DIM // 2, second.to(query.dtype.element_ty), mask=is_query)
    else:
        heads = tl.arange(0, KV_HEADS)[:, None]
        offsets = heads * HEAD_DIM + columns
        mask = (heads < NUM_KV_HEADS) & in_half
        keys = source + NUM_HEADS * HEAD_DIM
        values = keys + NUM_KV_HEADS * HEAD_DIM + offsets
        first_half, second_half = _rotated(keys, key_weight, offsets, columns, mask, cos, sin, eps, HEAD_DIM, HAS_NORM)
        first_key, second_key = first_half.to(key.dtype.element_ty), second_half.to(key.dtype.element_ty)
        first_value = tl.load(values, mask=mask, other=0.0)
        second_value = tl.load(values + HEAD_DIM // 2, mask=mask, other=0.0)
        num_bad = _num_nonfinite(first_key) + _num_nonfinite(second_key)
        num_bad += _num_nonfinite(first_value) + _num_nonfinite(second_value)
        tl.store(poison + token, tl.where(num_bad > 0, float("nan"), 0.0))
        start = token * NUM_KV_HEADS * HEAD_DIM + offsets
        tl.store(key + start, tl.where(num_bad > 0, 0.0, first_key), mask=mask)
        tl.store(key + start + HEAD_DIM // 2, tl.where(num_bad > 0, 0.0, second_key), mask=mask)
        tl.store(value + start, tl.where(num_bad > 0, 0.0, first_value), mask=mask)
        tl.store(value + start + HEAD_DIM // 2, tl.where(num_bad > 0, 0.0, second_value), mask=mask)


@triton.jit
def _rotated(
    source, weight, offsets, columns, mask, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """The two halves of heads, float32."""
    first = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + offsets + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        in_half = columns < HEAD_DIM // 2
        first *= scale * tl.load(weight + columns, mask=in_half, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HEAD_DIM // 2 + columns, mask=in_half, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _num_nonfinite(x):
    return tl.sum(tl.sum(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1), axis=1), axis=0)


@triton.jit
def _activate_token(gate_up, token_stride, activated, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < SIZE
    row = gate_up + token * token_stride + columns
    gate = tl.load(row, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE, mask=in_row, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(activated + token * SIZE + columns, result.to(activated.dtype.element_ty), mask=in_row)
