"""Rows to be sampled, and what their draws are compared with."""

import numpy as np
import torch

from tests.model.helpers.steps import int32
from tokasaurus.messages.forward import TokenMasks
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.sampling.noise import position_keys, sequence_keys
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs, fill_token_logprobs
from tokasaurus.model.sampling.sample import SamplingRows


def noise_keys(seeds: list[int], samples: list[int], positions: list[int]) -> torch.Tensor:
    keys = position_keys(
        sequence_keys(np.array(seeds, np.uint64), np.array(samples, np.uint32)), np.array(positions, np.int32)
    )
    return torch.from_numpy(keys.astype(np.int64))


def make_rows(
    temperatures: list[float], top_ps: list[float], keys: torch.Tensor, top_k: int = 0, min_p: float = 0.0
) -> SamplingRows:
    """top_k, min_p: of all rows."""
    is_limited = top_k > 0 or min_p > 0
    return SamplingRows(
        temperatures=torch.tensor(temperatures),
        top_ps=torch.tensor(top_ps),
        top_ks=torch.full((len(temperatures),), top_k, dtype=torch.int32),
        min_ps=torch.full((len(temperatures),), min_p),
        noise_keys=keys,
        any_sampled=any(t > 0 for t in temperatures),
        any_limited=any((p < 1 or is_limited) and t > 0 for p, t in zip(top_ps, temperatures, strict=True)),
        any_logprobs=True,
    )


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


LOGITS = [2.0, 1.5, 0.3, 0.0, -1.0, -2.5, 1.0]


def inside_by_hand(logits: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """What is left of float64 [V] probabilities after min_p, top_k and top_p, one after the other; bool [V]."""
    left = np.exp(logits - logits.max())
    left[left < min_p] = 0
    if top_k:
        left[left < np.sort(left)[::-1][min(top_k, len(left)) - 1]] = 0
    left /= left.sum()
    order = np.argsort(-left, kind="stable")
    before = np.cumsum(left[order]) - left[order]
    if top_p < 1:
        left[left < left[order][before < top_p][-1]] = 0
    return left > 0


def make_masks(allowed: dict[int, np.ndarray]) -> TokenMasks:
    """allowed: bool [V] by row."""
    padded = [np.pad(row, (0, -len(row) % 32)).reshape(-1, 32) for row in allowed.values()]
    bits = (np.stack(padded).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
    return TokenMasks(int32(list(allowed)), bits)


def token_logprobs_of(
    logits: torch.Tensor, target_ids: torch.Tensor, num_top: int, kernels: Kernels | None
) -> TokenLogprobs:
    num_rows = len(logits)
    computed = TokenLogprobs(
        torch.empty(num_rows, device=logits.device),
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        torch.empty((num_rows, num_top), dtype=torch.int32, device=logits.device),
        torch.empty((num_rows, num_top), device=logits.device),
    )
    fill_token_logprobs(logits, target_ids.int(), computed, kernels)
    return computed
