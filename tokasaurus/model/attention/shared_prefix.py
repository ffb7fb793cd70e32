"""Merge the attention of the same rows over two parts, such as a shared prefix and the rows' own suffixes.

Source: Hydragen, arXiv 2402.05099, section 3.2.
"""

import torch
from torch import Tensor

# R rows, H query heads, D head size


def merge_partial(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
    """AttentionBackend.merge with stock torch operations. 0 for a row that sees no token of either part."""
    (first_output, first_lse), (second_output, second_lse) = first, second
    # Subtract the larger LSE first: neither exponential overflows. The clamp avoids -inf minus -inf.
    largest = torch.maximum(first_lse, second_lse).clamp_min(torch.finfo(torch.float32).min)
    first_weight = (first_lse - largest).exp_().unsqueeze(-1)
    second_weight = (second_lse - largest).exp_().unsqueeze(-1)
    total = (first_weight + second_weight).clamp_min_(torch.finfo(torch.float32).tiny)
    weighted = first_output * first_weight + second_output * second_weight
    return torch.div(weighted, total, out=output)
