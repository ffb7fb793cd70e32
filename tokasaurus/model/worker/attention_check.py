"""Attention of a backend compared with plain float32 torch on the host, for this worker's heads and dtypes."""

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
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.worker.self_check import TOLERANCES, Measured, compared

# T tokens in this forward, H query heads, K key/value heads, D head size

_CPU = torch.device("cpu")
_DECODE_TOKENS = (1, 16, 40, 47)
"""Tokens that decode rows attend to, their own included."""
_PREFILL = ((5, 5), (3, 37), (20, 50))
"""(rows, tokens that the last one attends to) of each prompt: a first chunk and two later ones."""
_SHARED_BLOCKS = 2
"""Blocks of the prefix of a group."""


class Context(NamedTuple):
    """A sequence's end in this forward."""

    num_rows: int
    num_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class SmallForward:
    """A forward of few short sequences, with a name for the user. Rows that are grouped by prefix can also be computed
    alone."""

    name: str
    contexts: tuple[Context, ...]
    num_grouped: int = 0
    """The first contexts, which share _SHARED_BLOCKS."""
    is_recorded: bool = False

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return torch.tensor(
            [
                position
                for context in self.contexts
                for position in range(context.num_tokens - context.num_rows, context.num_tokens)
            ]
        )


def measure_attention(backend: AttentionBackend, shape: KVShape) -> Iterator[Measured]:
    """One result of each kind of forward. Replaces the backend's cache by one of a few blocks."""
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
    key, value = (_random((len(indices), shape.num_kv_heads, shape.head_dim), shape, generator) for _ in range(2))
    backend.plan(PagedLayout(indices.to(shape.device), ()))
    backend.write(key.to(shape.device), value.to(shape.device), layer)
    oracle.plan(PagedLayout(indices, ()))
    oracle.write(as_stored(key, shape.dtype).float(), as_stored(value, shape.dtype).float(), 0)
    if isinstance(backend, RecordableBackend):
        backend.prepare_recording(len(_DECODE_TOKENS), num_blocks)
    for forward in forwards:
        num_rows = len(forward.positions)
        query = _random((num_rows, shape.num_heads, shape.head_dim), shape, generator)
        new = [_random((num_rows, shape.num_kv_heads, shape.head_dim), shape, generator) for _ in range(2)]
        on_device = as_in_steps(layout_of(forward, shape.page_size), backend, shape)
        if forward.is_recorded:
            assert isinstance(backend, RecordableBackend)
            backend.plan_recorded(on_device)
        else:
            backend.plan(on_device)
        attends = attends_over(backend, on_device)
        sent, key, value = (x.to(shape.device) for x in (query, *new))
        found = attends(sent, key, value, layer).to(_CPU)
        alone = layout_of(replace(forward, num_grouped=0), shape.page_size)
        oracle.plan(alone)
        key, value = (as_stored(x, shape.dtype).float() for x in new)
        expected = attends_over(oracle, alone)(query.float(), key, value, 0)
        yield compared(f"attention ({forward.name})", found, expected, tolerance)
    if isinstance(backend, RecordableBackend):
        backend.prepare_recording(0, 0)
    backend.allocate(1)  # what is measured next must not count this cache


def _random(size: tuple[int, ...], shape: KVShape, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(shape.query_dtype)


def _forwards(page_size: int, can_record: bool) -> tuple[int, list[SmallForward]]:
    """The number of blocks with the padding block, and the forwards. Tokens scale with pages, so that every case
    has the same number of blocks."""
    next_block = 1 + _SHARED_BLOCKS

    def own(num_blocks: int) -> list[int]:
        nonlocal next_block
        next_block += num_blocks
        return list(range(next_block - num_blocks, next_block))[::-1]

    def alone(num_rows: int, num_tokens: int) -> Context:
        return Context(num_rows, num_tokens, own(-(-num_tokens // page_size)))

    def grouped(num_own: int) -> Context:
        shared = list(range(1, 1 + _SHARED_BLOCKS))
        return Context(1, _SHARED_BLOCKS * page_size + num_own, shared + own(-(-num_own // page_size)))

    decode = tuple(alone(1, num_tokens) for num_tokens in _DECODE_TOKENS)
    others = decode[::-1]
    prefill = tuple(alone(*sizes) for sizes in _PREFILL)
    group = tuple(grouped(num_own) for num_own in (1, 5, page_size + 3))
    forwards = [
        SmallForward("decode", decode),
        SmallForward("prefill", prefill),
        SmallForward("decode and prefill", (*decode, *prefill)),
        SmallForward("prefix group", (*group, *decode[:1]), num_grouped=len(group)),
    ]
    if can_record:
        recorded = (SmallForward("recorded decode", contexts, is_recorded=True) for contexts in (decode, others))
        forwards += recorded
    return next_block, forwards


def layout_of(forward: SmallForward, page_size: int, num_padding: int = 0) -> PagedLayout:
    """Grouped rows, other decode rows and prompts are a part each, as in a step. num_padding: rows after them."""
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
        prefix = _part([Context(num_grouped, num_shared, decode[0].blocks[:_SHARED_BLOCKS])], 0, False, True)
        after = [
            context._replace(num_tokens=context.num_tokens - num_shared, blocks=context.blocks[_SHARED_BLOCKS:])
            for context in decode[:num_grouped]
        ]
        parts.append(_part(after, 0, True, True))
    if decode[num_grouped:]:
        parts.append(_part(decode[num_grouped:], num_grouped, True, False))
    if prefill:
        parts.append(_part(prefill, len(decode), True, False))
    return PagedLayout(torch.tensor([*indices, *[0] * num_padding]), tuple(parts), prefix)


def _part(contexts: list[Context], first_row: int, causal: bool, is_partial: bool) -> PagedPart:
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
