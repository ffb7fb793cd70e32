"""Attention as one operation of torch, which a compiler leaves whole in the middle of the layers that it compiles.

What the operation does is set from outside (`attending`): it depends on the forward's layout, which is no tensor, and a
graph of launches may have to be interrupted around it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.row_split import attend_rows

# T tokens in this forward, H query heads, K key/value heads, D head size

Attends = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
"""Called once per layer with query [T, H, D]; key and value [T, K, D], which it stores in the cache of the layer; the
output to fill, [T, H, D]; and the layer's index."""

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

    def attends(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_index: int) -> None:
        # Write the keys and values of all rows before any row attends: a row may read blocks that another row of this
        # forward fills (see ForwardInput).
        backend.write(key, value, layer_index)
        attend_rows(backend, query, layer_index, layout, output)

    return attends


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    caches: Sequence[Tensor],  # noqa: ARG001  (declared as changed)
    layer_index: int,
) -> None:
    """caches: views of the backend's, which the call changes. The others are as in Attends."""
    assert _attends is not None, "attention runs inside `attending`"
    _attends(query, key, value, output, layer_index)


attend = torch.library.custom_op("tokasaurus::attend", _attend, mutates_args=("output", "caches"))


@attend.register_fake
def _compute_nothing(
    _query: Tensor, _key: Tensor, _value: Tensor, _output: Tensor, _caches: Sequence[Tensor], _layer_index: int
) -> None:
    """A compiler learns what it needs from the declared arguments: the call returns nothing."""
