"""Sampling as one operation that reads parameters from tensors alone, as the kernels for CUDA do."""

import torch
from torch import Tensor

from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.model.sampling.rules import has_limits, limited_rows
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, sample
from tokasaurus.model.staging.staging import ON_HOST


def sample_on_device(logits: Tensor, rows: SamplingRows) -> Sampled:
    """In place of sample_by_triton, for rows without rules, masks and top log-probabilities."""
    assert rows.rules is None
    assert rows.masks is None
    assert rows.top is None
    tokens, logprobs = _sample(logits, rows.device_params, rows.noise_keys)
    return Sampled(tokens, logprobs if rows.any_logprobs else None)


@torch.library.custom_op("device_sampling::sample", mutates_args=())
def _sample(logits: Tensor, device_params: Tensor, noise_keys: Tensor) -> tuple[Tensor, Tensor]:
    params = device_params.numpy().view(SAMPLING_DTYPE).reshape(len(logits))
    limited = limited_rows(has_limits(params), ON_HOST)
    sampled = sample(logits, SamplingRows(params, device_params, noise_keys, True, limited), None)
    assert sampled.logprobs is not None
    return sampled.tokens, sampled.logprobs
