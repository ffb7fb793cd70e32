"""Rows and masks to sample with, and the distributions that draws are compared with."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.model.helpers.steps import CPU, int32
from tokasaurus.messages.forward import TokenMasks
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.sampling.noise import position_keys, sequence_keys
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs, fill_token_logprobs
from tokasaurus.model.sampling.rules import (
    DeviceMasks,
    choose_rows,
    has_limits,
    limited_rows,
    params_to_device,
    stage_masks,
)
from tokasaurus.model.sampling.sample import SamplingRows, TopRows
from tokasaurus.model.staging.staging import ON_HOST


def noise_keys(seeds: list[int], samples: list[int], positions: list[int]) -> torch.Tensor:
    keys = position_keys(
        sequence_keys(np.array(seeds, np.uint64), np.array(samples, np.uint32)), np.array(positions, np.int32)
    )
    return torch.from_numpy(keys.astype(np.int64))


def make_rows(
    temperatures: list[float], top_ps: list[float], keys: torch.Tensor, top_k: int = 0, min_p: float = 0.0
) -> SamplingRows:
    """top_k, min_p: the same for all rows."""
    values = zip(temperatures, top_ps, strict=True)
    params = np.array([SamplingParams(*row, top_k, min_p) for row in values], SAMPLING_DTYPE)
    limited = limited_rows(has_limits(params), ON_HOST)
    return SamplingRows(params, params_to_device(params, CPU), keys, any_logprobs=True, limited=limited)


def with_params(rows: SamplingRows, **columns: np.ndarray) -> SamplingRows:
    """columns: other values for fields of SamplingParams, [R] each."""
    params = rows.params.copy()
    for name, values in columns.items():
        params[name] = values
    limited = limited_rows(has_limits(params), ON_HOST)
    return dataclasses.replace(rows, params=params, device_params=params_to_device(params, CPU), limited=limited)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


LOGITS = [2.0, 1.5, 0.3, 0.0, -1.0, -2.5, 1.0]


def inside_limits(logits: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """logits float64 [V] -> bool [V]: the tokens inside min_p, top_k and top_p, applied in this order."""
    kept: np.ndarray = np.exp(logits - logits.max())
    kept[kept < min_p] = 0
    if top_k:
        kept[kept < np.sort(kept)[::-1][min(top_k, len(kept)) - 1]] = 0
    kept /= kept.sum()
    order = np.argsort(-kept, kind="stable")
    before = np.cumsum(kept[order]) - kept[order]
    if top_p < 1:
        kept[kept < kept[order][before < top_p][-1]] = 0
    return kept > 0


def make_masks(allowed: dict[int, np.ndarray]) -> TokenMasks:
    """allowed: bool [V] by row."""
    padded = [np.pad(row, (0, -len(row) % 32)).reshape(-1, 32) for row in allowed.values()]
    bits = (np.stack(padded).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
    return TokenMasks(int32(list(allowed)), bits)


def staged_masks(allowed: dict[int, np.ndarray]) -> DeviceMasks:
    """As make_masks, for `sample`."""
    return stage_masks(make_masks(allowed), ON_HOST)


def on_device(value: Any, device: torch.device) -> Any:
    """SamplingRows, or a part of it, with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):  # DeviceMasks
        return type(value)(*(on_device(part, device) for part in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: on_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def top_rows(rows: Sequence[int], count: int) -> TopRows:
    """Some rows that want `count` top-k logprobs each."""
    return TopRows(choose_rows(np.array(rows), ON_HOST), count)


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
