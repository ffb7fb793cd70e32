"""What the model says of tokens that are there already: those of prompts, each by the tokens before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels

# T tokens in this forward, E hidden size, Q tokens that are scored, V vocabulary, K likeliest tokens

SCORED_AT_ONCE = 256
"""Rows that pass the LM head together: bounds the memory of their logits, whatever the length of a prompt."""

_ROWS_AT_ONCE = 64
"""Without kernels, logits are widened to float32, so many rows at a time."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """rows: int64 [P], of the T, behind each of which a token is scored; the first Q of them, the others are padding.
    target_ids: int32 [Q], these tokens. num_top: K. Both tensors are on the device."""

    rows: Tensor
    target_ids: Tensor
    num_top: int


class Scores(NamedTuple):
    """logprobs: float32 [Q]. ranks: int32 [Q]. top_ids: int32 [Q, K]. top_logprobs: float32 [Q, K]. See TokenScores.
    Which of equals are among the likeliest is open."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def score(hidden: Tensor, scored: ScoredTokens, head: Callable[[Tensor], Tensor], kernels: Kernels | None) -> Scores:
    """hidden [T, E]. head: [rows, E] -> logits [rows, V], which its next call may overwrite."""
    num_scored = len(scored.target_ids)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_scored, *shape), dtype=dtype, device=hidden.device)

    scores = Scores(
        *(empty(torch.float32), empty(torch.int32)),
        *(empty(torch.int32, scored.num_top), empty(torch.float32, scored.num_top)),
    )
    for start in range(0, num_scored, SCORED_AT_ONCE):
        chunk = slice(start, min(start + SCORED_AT_ONCE, num_scored))
        logits = head(hidden[scored.rows[start : start + SCORED_AT_ONCE]])[: chunk.stop - start]
        score_logits(logits, scored.target_ids[chunk], Scores(*(tensor[chunk] for tensor in scores)), kernels)
    return scores


def score_logits(logits: Tensor, target_ids: Tensor, scores: Scores, kernels: Kernels | None) -> None:
    """logits [Q, V], target_ids int32 [Q] -> scores, which are filled. kernels: does the same on the CPU, faster."""
    if kernels is not None and logits.device.type == "cpu" and logits.dtype in ACTIVATION_DTYPES:
        kernels.score(logits, target_ids, *scores)
        return
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        chunk = slice(start, start + _ROWS_AT_ONCE)
        logprobs, ranks, top_ids, top_logprobs = (tensor[chunk] for tensor in scores)
        values = logits[chunk].float()
        normalizers = values.logsumexp(dim=-1, keepdim=True)
        targets = values.gather(1, target_ids[chunk].long().unsqueeze(1))
        logprobs.copy_((targets - normalizers).squeeze(1))
        ranks.copy_((values > targets).sum(dim=-1) + 1)
        likeliest = values.topk(top_ids.shape[1], dim=-1)
        top_ids.copy_(likeliest.indices)
        top_logprobs.copy_(likeliest.values - normalizers)
