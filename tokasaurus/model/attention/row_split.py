"""The attention of a forward, part by part, as the layers see it: a call, or one operation of torch that a compiler
leaves whole.

What the operation does is set from outside (`attending`): it depends on the forward's layout, which is no tensor, and a
recording of launches is interrupted around it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, LayoutBackend, PagedLayout, PagedPart

# T tokens in this forward, R rows of a part, H query heads, K key/value heads, D head size


class Attends(Protocol):
    """The attention of one forward, called once per layer."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None
    ) -> Tensor:
        """query [T, H, D]; key and value [T, K, D], which are stored in the layer's cache -> [T, H, D]: `output`, or
        any memory if that is None."""


_LOG2_E = 1 / math.log(2)

_attends: Attends | None = None


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Inside, `attend` calls this."""
    global _attends  # a compiled graph passes tensors and numbers only
    before, _attends = _attends, attends
    try:
        yield
    finally:
        _attends = before


def attends_over(
    backend: AttentionBackend, layout: PagedLayout, fills_padding: bool = True, writes: bool = True
) -> Attends:
    """Attention of a planned layout. fills_padding: with 0; else what is returned for padding is undefined. writes:
    stores keys and values first; else the caller has done so."""
    # Not for each layer: it takes Python as long as several launches to look for a protocol's methods.
    is_whole = isinstance(backend, LayoutBackend)

    def attends(query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None) -> Tensor:
        # Write the keys and values of all rows before any row attends: a row may read blocks that another row of this
        # forward fills (see ForwardInput).
        if writes:
            backend.write(key, value, layer_index)
        if is_whole:
            return attend_rows(backend, query, layer_index, layout, output)
        return _attend_parts(backend, query, layer_index, layout, output, fills_padding)

    return attends


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    caches: Sequence[Tensor],  # noqa: ARG001  (declared as changed)
    layer_index: int,
) -> None:
    """output: [T, H, D], to be filled. caches: views of the backend's, which the call changes. The others are as in
    Attends."""
    assert _attends is not None, "attention runs inside `attending`"
    _attends(query, key, value, layer_index, output)


attend = torch.library.custom_op("tokasaurus::attend", _attend, mutates_args=("output", "caches"))


@attend.register_fake
def _compute_nothing(
    _query: Tensor, _key: Tensor, _value: Tensor, _output: Tensor, _caches: Sequence[Tensor], _layer_index: int
) -> None:
    """A compiler learns what it needs from the declared arguments: the call returns nothing."""


def attended_by_operation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_index: int,
    output: Tensor | None = None,
    caches: Sequence[Tensor] = (),
) -> Tensor:
    """As Attends, by `attend`. caches: those that the compiler sees."""
    output = torch.empty_like(query) if output is None else output
    attend(query, key, value, output, caches, layer_index)
    return output


def attend_rows(
    backend: AttentionBackend, query: Tensor, layer_index: int, layout: PagedLayout, output: Tensor | None = None
) -> Tensor:
    """query [T, H, D] -> [T, H, D], each row computed with its part of the layout; 0 for padding.

    output: [T, H, D], contiguous, which is filled and returned; None: the caller needs no particular memory.
    """
    if isinstance(backend, LayoutBackend):
        attended = backend.attend_layout(query, layer_index, layout)
        return attended if output is None else output.copy_(attended)
    return _attend_parts(backend, query, layer_index, layout, output, fills_padding=True)


def _attend_parts(
    backend: AttentionBackend,
    query: Tensor,
    layer_index: int,
    layout: PagedLayout,
    output: Tensor | None,
    fills_padding: bool,
) -> Tensor:
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_rows = 0
    for part in layout.parts:
        rows = slice(part.first_row, part.first_row + part.num_rows)
        if part.is_partial:
            assert layout.prefix is not None
            prefix = _attend_partial(backend, query[rows], layer_index, layout.prefix)
            suffix = _attend_partial(backend, query[rows], layer_index, part)
            backend.merge(prefix, suffix, output[rows])
        else:
            backend.attend(query[rows], layer_index, part, output[rows])
        num_rows += part.num_rows
    if fills_padding and num_rows < len(query):
        output[num_rows:].zero_()
    return output


def _attend_partial(
    backend: AttentionBackend, query: Tensor, layer_index: int, part: PagedPart
) -> tuple[Tensor, Tensor]:
    output, lse = backend.attend(query, layer_index, part)
    assert lse is not None, "of a partial part"
    return output, lse


def merge_partial(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor, is_base_2: bool = False
) -> Tensor:
    """AttentionBackend.merge with stock torch operations. 0 for a row that sees no token of either part.

    is_base_2: of the LSE; otherwise it is natural."""
    (first_output, first_lse), (second_output, second_lse) = first, second
    # Subtract the larger LSE first: neither exponential overflows. The clamp avoids -inf minus -inf.
    largest = torch.maximum(first_lse, second_lse).clamp_min(torch.finfo(torch.float32).min)
    first_weight, second_weight = ((lse - largest).unsqueeze(-1) for lse in (first_lse, second_lse))
    for weight in (first_weight, second_weight):
        weight.exp2_() if is_base_2 else weight.exp_()
    total = (first_weight + second_weight).clamp_min_(torch.finfo(torch.float32).tiny)
    weighted = first_output * first_weight + second_output * second_weight
    return torch.div(weighted, total, out=output)


def count_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Change a part's output [R, H, D] and LSE [R, H] of base 2 as if each head saw one more token, of value 0, whose
    score is its sink. sinks: float32 [H], natural."""
    total = torch.logaddexp2(lse, sinks * _LOG2_E)
    output.mul_(torch.exp2(lse - total).unsqueeze(-1))
    lse.copy_(total)
