"""Attend the rows of a forward part by part."""

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout

# T tokens in this forward, H query heads, D head size


def attend_rows(backend: AttentionBackend, query: Tensor, layer_index: int, layout: PagedLayout) -> Tensor:
    """query [T, H, D] -> [T, H, D], each row by the part of the layout that it lies in; 0 for padding."""
    outputs = []
    for part in layout.parts:
        rows = query[part.first_row : part.first_row + part.num_rows]
        output, _ = backend.attend(rows, layer_index, part)
        outputs.append(output)
    num_padding = query.shape[0] - sum(part.num_rows for part in layout.parts)
    if num_padding:
        outputs.append(query.new_zeros((num_padding, *query.shape[1:])))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
