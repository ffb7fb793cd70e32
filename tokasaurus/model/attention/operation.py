"""Attention of one layer as the layers see it: a call, or one operation of torch that a compiler leaves whole.

What the operation does is set from outside (`attending`): it depends on the forward's layout, which is no tensor, and a
recording of launches is interrupted around it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.row_split import attend_rows

# T tokens in this forward, H query heads, K key/value heads, D head size


class Attends(Protocol):
    """The attention of one forward, called once per layer."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None
    ) -> Tensor:
        """query [T, H, D]; key and value [T, K, D], which are stored in the layer's cache -> [T, H, D]: `output`, or
        any memory if that is None."""


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


def attends_over(backend: AttentionBackend, layout: PagedLayout) -> Attends:
    """Attention of a planned layout."""

    def attends(query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None) -> Tensor:
        # Write the keys and values of all rows before any row attends: a row may read blocks that another row of this
        # forward fills (see ForwardInput).
        backend.write(key, value, layer_index)
        return attend_rows(backend, query, layer_index, layout, output)

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
