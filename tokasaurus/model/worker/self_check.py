"""Checks of a start, on the device at hand, before the KV cache is sized: what computes wrongly is not used.

Attention of a backend is compared with plain float32 torch on the host, for this worker's heads and dtypes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import (
    AttentionBackend,
    KVShape,
    PagedLayout,
    PagedPart,
    RecordableBackend,
    as_stored,
)
from tokasaurus.model.attention.block_lists import as_in_steps
from tokasaurus.model.attention.operation import attends_over
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.execution.runner import ModelRunner

# T tokens in this forward, H query heads, K key/value heads, D head size

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Largest allowed difference, as a share of the oracle's largest value, by the less precise of the dtypes of
activations and cache."""

_CPU = torch.device("cpu")
_DECODE_TOKENS = (1, 16, 40, 47)
"""Tokens that decode rows attend to, their own included."""
_PREFILL = ((5, 5), (3, 37), (20, 50))
"""(rows, tokens that the last one attends to) of each prompt: a first chunk and two later ones."""
_SHARED_BLOCKS = 2
"""Blocks of the prefix of a group."""


class ComputesWrongly(Exception):
    """One line: what differs, from what, and by how much."""


class _Context(NamedTuple):
    """A sequence's end in this forward."""

    num_rows: int
    num_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward, with a name for the user. Its rows that are grouped by prefix are also computed alone."""

    name: str
    contexts: tuple[_Context, ...]
    num_grouped: int = 0
    """The first contexts, which share _SHARED_BLOCKS."""
    is_recorded: bool = False


def check_attention(backend: AttentionBackend, shape: KVShape) -> None:
    """Raises ComputesWrongly. Replaces the backend's cache by one of a few blocks."""
    for name, error, tolerance in measure_attention(backend, shape):
        if not error <= tolerance:
            raise ComputesWrongly(
                f"attention ({name}) differs from plain torch by {error:.2g}, allowed is {tolerance:g}"
            )


def describe_wrong_graphs(runner: ModelRunner, dtype: torch.dtype) -> str | None:
    """One line if replays of a recorded graph differ from launched steps, or raise; None if they agree."""
    try:
        error = runner.graph_error()
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of a driver or a library
        return f"a replayed graph raises {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if error <= TOLERANCES[dtype]:
        return None
    return f"a replayed graph differs from launched steps by {error:.2g}, allowed is {TOLERANCES[dtype]:g}"


def measure_attention(backend: AttentionBackend, shape: KVShape) -> Iterator[tuple[str, float, float]]:
    """(what, error, tolerance) of each kind of forward; NaN is an error that no tolerance allows."""
    tolerance = max(TOLERANCES[shape.dtype], TOLERANCES[shape.query_dtype])
    oracle = ReferenceBackend(
        replace(shape, num_layers=1, dtype=torch.float32, activation_dtype=torch.float32, device=_CPU)
    )
    num_blocks, forwards = _forwards(shape.page_size, isinstance(backend, RecordableBackend))
    generator = torch.Generator().manual_seed(0)
    backend.allocate(num_blocks)
    oracle.allocate(num_blocks)
    layer = shape.num_layers - 1
    indices = torch.arange(shape.page_size, num_blocks * shape.page_size)
    filled = [_random((len(indices), shape.num_kv_heads, shape.head_dim), shape, generator) for _ in range(2)]
    backend.plan(PagedLayout(indices.to(shape.device), ()))
    key, value = (x.to(shape.device) for x in filled)
    backend.write(key, value, layer)
    oracle.plan(PagedLayout(indices, ()))
    key, value = (as_stored(x, shape.dtype).float() for x in filled)
    oracle.write(key, value, 0)
    if isinstance(backend, RecordableBackend):
        backend.prepare_recording(len(_DECODE_TOKENS), num_blocks)
    for forward in forwards:
        num_rows = sum(context.num_rows for context in forward.contexts)
        query = _random((num_rows, shape.num_heads, shape.head_dim), shape, generator)
        new = [_random((num_rows, shape.num_kv_heads, shape.head_dim), shape, generator) for _ in range(2)]
        on_device = as_in_steps(_layout(forward, shape.page_size), backend, shape)
        if forward.is_recorded:
            assert isinstance(backend, RecordableBackend)
            backend.plan_recorded(on_device)
        else:
            backend.plan(on_device)
        attends = attends_over(backend, on_device)
        sent, key, value = (x.to(shape.device) for x in (query, *new))
        found = attends(sent, key, value, layer).float().to(_CPU)
        alone = _layout(replace(forward, num_grouped=0), shape.page_size)
        oracle.plan(alone)
        key, value = (as_stored(x, shape.dtype).float() for x in new)
        expected = attends_over(oracle, alone)(query.float(), key, value, 0)
        yield forward.name, float((found - expected).abs().max() / expected.abs().max()), tolerance
    if isinstance(backend, RecordableBackend):
        backend.prepare_recording(0, 0)


def _random(size: tuple[int, ...], shape: KVShape, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(shape.query_dtype)


def _forwards(page_size: int, can_record: bool) -> tuple[int, list[_Forward]]:
    """The number of blocks with the padding block, and the forwards. Tokens scale with pages, so that every case
    has the same number of blocks."""
    next_block = 1 + _SHARED_BLOCKS

    def own(num_blocks: int) -> list[int]:
        nonlocal next_block
        next_block += num_blocks
        return list(range(next_block - num_blocks, next_block))[::-1]

    def alone(num_rows: int, num_tokens: int) -> _Context:
        return _Context(num_rows, num_tokens, own(-(-num_tokens // page_size)))

    def grouped(num_own: int) -> _Context:
        shared = list(range(1, 1 + _SHARED_BLOCKS))
        return _Context(1, _SHARED_BLOCKS * page_size + num_own, shared + own(-(-num_own // page_size)))

    decode = tuple(alone(1, num_tokens) for num_tokens in _DECODE_TOKENS)
    others = decode[::-1]
    prefill = tuple(alone(*sizes) for sizes in _PREFILL)
    group = tuple(grouped(num_own) for num_own in (1, 5, page_size + 3))
    forwards = [
        _Forward("decode", decode),
        _Forward("prefill", prefill),
        _Forward("decode and prefill", (*decode, *prefill)),
        _Forward("prefix group", (*group, *decode[:1]), num_grouped=len(group)),
    ]
    if can_record:
        recorded = (_Forward("recorded decode", contexts, is_recorded=True) for contexts in (decode, others))
        forwards += recorded
    return next_block, forwards


def _layout(forward: _Forward, page_size: int) -> PagedLayout:
    """Grouped rows, other decode rows and prompts are a part each, as in a step."""
    decode = [context for context in forward.contexts if context.num_rows == 1]
    prefill = [context for context in forward.contexts if context.num_rows > 1]
    num_grouped = forward.num_grouped
    indices = [
        context.blocks[token // page_size] * page_size + token % page_size
        for context in (*decode, *prefill)
        for token in range(context.num_tokens - context.num_rows, context.num_tokens)
    ]
    parts, prefix = [], None
    if num_grouped:
        num_shared = _SHARED_BLOCKS * page_size
        prefix = _part([_Context(num_grouped, num_shared, decode[0].blocks[:_SHARED_BLOCKS])], 0, False, True)
        after = [
            context._replace(num_tokens=context.num_tokens - num_shared, blocks=context.blocks[_SHARED_BLOCKS:])
            for context in decode[:num_grouped]
        ]
        parts.append(_part(after, 0, True, True))
    if decode[num_grouped:]:
        parts.append(_part(decode[num_grouped:], num_grouped, True, False))
    if prefill:
        parts.append(_part(prefill, len(decode), True, False))
    return PagedLayout(torch.tensor(indices), tuple(parts), prefix)


def _part(contexts: list[_Context], first_row: int, causal: bool, is_partial: bool) -> PagedPart:
    width = max(len(context.blocks) for context in contexts)
    counts = torch.tensor([0, *(context.num_rows for context in contexts)])
    return PagedPart(
        first_row=first_row,
        num_rows=int(counts.sum()),
        query_starts=counts.cumsum(0).int(),
        block_table=torch.tensor([c.blocks + [0] * (width - len(c.blocks)) for c in contexts], dtype=torch.int32),
        kv_lengths=torch.tensor([context.num_tokens for context in contexts], dtype=torch.int32),
        causal=causal,
        is_partial=is_partial,
    )
