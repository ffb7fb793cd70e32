"""Tokens that min_p, top_k and top_p exclude."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.sampling.chosen_rows import ChosenRows, choose_rows
from tokasaurus.model.sampling.params import ParamColumns
from tokasaurus.model.staging.staging import Staging

# R rows that sample, V vocabulary, C of its tokens

_MAX_CANDIDATES = 1024
"""Most likely tokens to which a CPU applies limits first; it sorts the vocabulary only if these do not suffice."""


class LimitsInUse(NamedTuple):
    """Which limits some rows have, read from their parameters on the host."""

    any_top_p: bool
    largest_top_k: int
    """0 if no row has a top_k."""


def limits_in_use(params: NDArray[np.void]) -> LimitsInUse:
    """params: SAMPLING_DTYPE [R], R > 0."""
    return LimitsInUse(bool((params["top_p"] < 1).any()), int(params["top_k"].max()))


def has_limits(params: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each row has limits; greedy rows have none. params: SAMPLING_DTYPE [R] -> bool [R]."""
    has_some = (params["top_p"] < 1) | (params["top_k"] > 0) | (params["min_p"] > 0)
    return np.asarray(has_some & (params["temperature"] > 0))


def limited_rows(is_limited: NDArray[np.bool_], staging: Staging) -> ChosenRows | None:
    """The rows that have limits; None if there are none. is_limited: bool [R], from has_limits."""
    rows = np.flatnonzero(is_limited)
    return choose_rows(rows, staging) if len(rows) else None


def outside_limits(adjusted: Tensor, params: ParamColumns, in_use: LimitsInUse) -> Tensor:
    """Whether the limits exclude each token: min_p, then top_k, then top_p, each applied to the tokens that remain.

    The order is vLLM's. The token that crosses top_p is kept, and so are all tokens as likely as the last one kept.
    adjusted: logits divided by the temperatures, float32 [R, V]; params: [R] -> bool [R, V].
    Sources: arXiv 1904.09751 (top_p), 2407.01082 (min_p).
    """
    probabilities = adjusted.softmax(dim=-1)
    vocab_size = adjusted.shape[1]
    if not in_use.any_top_p:
        ordered = probabilities.topk(min(max(in_use.largest_top_k, 1), vocab_size), dim=-1).values
        return probabilities < _smallest_before_top_p(ordered, params)
    smallest = None
    if adjusted.device.type == "cpu":  # Elsewhere, the host would wait to see whether some candidates suffice.
        ordered = probabilities.topk(min(_MAX_CANDIDATES, vocab_size), dim=-1).values
        if ordered.shape[1] == vocab_size or _suffices(ordered, params):
            smallest = _smallest_inside(ordered, params)
    if smallest is None:
        smallest = _smallest_inside(probabilities.sort(dim=-1, descending=True).values, params)
    return probabilities < smallest


def _smallest_before_top_p(ordered: Tensor, params: ParamColumns) -> Tensor:
    """The least probability inside min_p and top_k, float32 [R, 1].

    ordered: float32 [R, C], the C largest probabilities, in descending order: all, or as many as the largest top_k.
    """
    top_k, min_p = params["top_k"].unsqueeze(1), params["min_p"].unsqueeze(1)
    smallest = ordered[:, :1] * min_p
    kth = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
    return torch.where(top_k > 0, smallest.maximum(kth), smallest)


def _suffices(ordered: Tensor, params: ParamColumns) -> bool:
    """Whether the C < V most likely tokens of each row include all tokens inside its limits. Waits for the answer.

    ordered: float32 [R, C], as in _smallest_inside.
    """
    smallest = _smallest_before_top_p(ordered, params)
    sums = torch.where(ordered >= smallest, ordered, 0).cumsum(dim=-1)[:, -1:]
    top_p = params["top_p"].unsqueeze(1)
    reaches_on = torch.where(smallest == 0, sums < top_p, ordered[:, -1:] >= smallest)
    return not bool((reaches_on | (params["top_k"].unsqueeze(1) >= ordered.shape[1])).any())


def _smallest_inside(ordered: Tensor, params: ParamColumns) -> Tensor:
    """The least probability inside all limits, float32 [R, 1].

    ordered: float32 [R, C], the C largest probabilities, in descending order: all, or as many as suffice.
    """
    top_p = params["top_p"].unsqueeze(1)
    smallest = _smallest_before_top_p(ordered, params)
    left = torch.where(ordered >= smallest, ordered, 0)
    sums = left.cumsum(dim=-1)
    # If all tokens remain before top_p, they sum to 1: the least likely ones need not be read.
    targets = top_p * torch.where(smallest == 0, 1, sums[:, -1:])
    num_inside = ((sums - left < targets) & (left > 0)).sum(dim=-1, keepdim=True)
    crossing = ordered.gather(1, (num_inside - 1).clamp(min=0))
    return torch.where(top_p < 1, smallest.maximum(crossing), smallest)
