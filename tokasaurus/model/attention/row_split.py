"""Compute the attention of a forward part by part."""

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, LayoutBackend, PagedLayout, PagedPart

# T tokens in this forward, H query heads, D head size


def attend_rows(
    backend: AttentionBackend, query: Tensor, layer_index: int, layout: PagedLayout, output: Tensor | None = None
) -> Tensor:
    """query [T, H, D] -> [T, H, D], each row computed with its part of the layout; 0 for padding.

    output: [T, H, D], which is filled and returned; None: the caller needs no particular memory.
    """

    if isinstance(backend, LayoutBackend):
        attended = backend.attend_layout(query, layer_index, layout)
        return attended if output is None else output.copy_(attended)

    def attend(part: PagedPart) -> tuple[Tensor, Tensor]:
        return backend.attend(query[part.first_row : part.first_row + part.num_rows], layer_index, part)

    outputs = [attend(part) for part in layout.parts]
    results = [output for output, _ in outputs]
    if layout.prefix is not None:
        results[0] = backend.merge(attend(layout.prefix), outputs[0], query.dtype)
    num_padding = query.shape[0] - sum(part.num_rows for part in layout.parts)
    if num_padding:
        results.append(query.new_zeros((num_padding, *query.shape[1:])))
    if output is not None:
        return torch.cat(results, out=output)
    return results[0] if len(results) == 1 else torch.cat(results)
