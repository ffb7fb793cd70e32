"""Compute the attention of a forward part by part."""

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, LayoutBackend, PagedLayout, PagedPart

# T tokens in this forward, H query heads, D head size


def attend_rows(backend: AttentionBackend, query: Tensor, layer_index: int, layout: PagedLayout) -> Tensor:
    """query [T, H, D] -> [T, H, D], each row computed with its part of the layout; 0 for padding."""

    if isinstance(backend, LayoutBackend):
        return backend.attend_layout(query, layer_index, layout)

    def attend(part: PagedPart) -> tuple[Tensor, Tensor]:
        return backend.attend(query[part.first_row : part.first_row + part.num_rows], layer_index, part)

    outputs = [attend(part) for part in layout.parts]
    results = [output for output, _ in outputs]
    if layout.prefix is not None:
        results[0] = backend.merge(attend(layout.prefix), outputs[0], query.dtype)
    num_padding = query.shape[0] - sum(part.num_rows for part in layout.parts)
    if num_padding:
        results.append(query.new_zeros((num_padding, *query.shape[1:])))
    return results[0] if len(results) == 1 else torch.cat(results)
