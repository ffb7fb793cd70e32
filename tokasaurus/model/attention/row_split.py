"""Compute the attention of a forward part by part."""

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, LayoutBackend, PagedLayout, PagedPart

# T tokens in this forward, H query heads, D head size


def attend_rows(
    backend: AttentionBackend, query: Tensor, layer_index: int, layout: PagedLayout, output: Tensor | None = None
) -> Tensor:
    """query [T, H, D] -> [T, H, D], each row computed with its part of the layout; 0 for padding.

    output: [T, H, D], contiguous, which is filled and returned; None: the caller needs no particular memory.
    """
    if isinstance(backend, LayoutBackend):
        attended = backend.attend_layout(query, layer_index, layout)
        return attended if output is None else output.copy_(attended)

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
    if num_rows < len(query):
        output[num_rows:].zero_()
    return output


def _attend_partial(
    backend: AttentionBackend, query: Tensor, layer_index: int, part: PagedPart
) -> tuple[Tensor, Tensor]:
    output, lse = backend.attend(query, layer_index, part)
    assert lse is not None, "of a partial part"
    return output, lse
