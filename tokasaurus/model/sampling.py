"""Logits to tokens and log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.model.kernels.library import KERNEL_DTYPES, Kernels
from tokasaurus.model.sampling_noise import gumbel_noise

# R rows that sample, V vocabulary

_ROWS_AT_ONCE = 64
"""Bounds the memory of intermediate results: hashing noise takes 64-bit integers, 8 bytes a logit."""

_TOP_P_CANDIDATES = 1024
"""Tokens looked at before a row's whole vocabulary is sorted for top-p."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of the R rows of logits is sampled.

    temperatures: float32 [R], 0 is greedy. top_ps: float32 [R]. noise_keys: int64 [R, 2], from position_keys.
    any_sampled, any_top_p, any_logprobs: whether some row needs it, known to the host.
    """

    temperatures: Tensor
    top_ps: Tensor
    noise_keys: Tensor
    any_sampled: bool
    any_top_p: bool
    any_logprobs: bool


def sample(logits: Tensor, rows: SamplingRows, kernels: Kernels | None) -> tuple[Tensor, Tensor | None]:
    """logits [R, V] -> token ids int64 [R], and their log-probabilities float32 [R] where some row wants them.

    Log-probabilities are of the model's own distribution, before temperature and top-p.
    kernels: does the same on the CPU, faster.
    """
    if kernels is not None and (logits.device.type != "cpu" or logits.dtype not in KERNEL_DTYPES):
        kernels = None
    if kernels is not None:
        return kernels.sample(logits, rows.temperatures, rows.top_ps, rows.noise_keys, rows.any_logprobs)
    candidates = _mask_unlikely(logits, rows) if rows.any_top_p else logits
    tokens = _draw(candidates, rows) if rows.any_sampled else candidates.argmax(dim=-1)
    return tokens, _chosen_logprobs(logits, tokens) if rows.any_logprobs else None


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for chunk in _chunks(logits.shape[0]):
        temperatures = rows.temperatures[chunk].unsqueeze(1)
        noise = gumbel_noise(rows.noise_keys[chunk], logits.shape[1])
        scores = logits[chunk].float() / torch.where(temperatures > 0, temperatures, 1)
        tokens[chunk] = scores.add_(noise.masked_fill_(temperatures == 0, 0)).argmax(dim=-1)
    return tokens


def _chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for chunk in _chunks(logits.shape[0]):
        scores = logits[chunk].float()
        chosen = scores.gather(1, tokens[chunk].unsqueeze(1)).squeeze(1)
        logprobs[chunk] = chosen - scores.logsumexp(dim=-1)
    return logprobs


def _mask_unlikely(logits: Tensor, rows: SamplingRows) -> Tensor:
    """A copy of logits [R, V] with -inf for the tokens that a row's top-p excludes at its temperature."""
    masked = logits.clone()
    for chunk in _chunks(logits.shape[0]):
        temperatures = rows.temperatures[chunk]
        top_ps = torch.where(temperatures > 0, rows.top_ps[chunk], 1)
        limited = (top_ps < 1).nonzero().squeeze(1)
        if len(limited):
            some = logits[chunk][limited]
            unlikely = outside_top_p(some.float() / temperatures[limited].unsqueeze(1), top_ps[limited])
            masked[chunk][limited] = some.masked_fill(unlikely, -torch.inf)
    return masked


def outside_top_p(scores: Tensor, top_ps: Tensor) -> Tensor:
    """All but the most likely tokens that together reach top_p; the token that crosses it is inside.

    scores: float32 [R, V]. top_ps: float32 [R] -> bool [R, V]. Source: arXiv 1904.09751.
    """
    probabilities = scores.softmax(dim=-1)
    ordered = probabilities.topk(min(_TOP_P_CANDIDATES, scores.shape[1]), dim=-1).values
    if bool((ordered.sum(dim=-1) < top_ps).any()):
        ordered = probabilities.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    num_inside = (before < top_ps.unsqueeze(1)).sum(dim=-1, keepdim=True)
    return probabilities < ordered.gather(1, (num_inside - 1).clamp(min=0))


def _chunks(num_rows: int) -> list[slice]:
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)]
