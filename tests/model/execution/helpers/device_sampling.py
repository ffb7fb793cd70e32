"""Sampling as one operation that reads parameters from tensors alone, as the kernels for CUDA do."""

import torch
from torch import Tensor

from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.model.sampling.finish import Finished, finish_by_torch
from tokasaurus.model.sampling.rules import has_limits, limited_rows
from tokasaurus.model.sampling.sample import SamplingRows, sample
from tokasaurus.model.staging.staging import ON_HOST


def finish_on_device(
    logits: Tensor, device_params: Tensor, noise_keys: Tensor, hidden: Tensor, slots: Tensor, last_tokens: Tensor
) -> Finished:
    """In place of draw_and_finish."""
    tokens, logprobs = _sample(logits, device_params, noise_keys)
    return finish_by_torch(tokens, logprobs, hidden, slots, last_tokens)


@torch.library.custom_op("device_sampling::sample", mutates_args=())
def _sample(logits: Tensor, device_params: Tensor, noise_keys: Tensor) -> tuple[Tensor, Tensor]:
    params = device_params.numpy().view(SAMPLING_DTYPE).reshape(len(logits))
    limited = limited_rows(has_limits(params), ON_HOST)
    sampled = sample(logits, SamplingRows(params, device_params, noise_keys, True, limited), None)
    assert sampled.logprobs is not None
    return sampled.tokens, sampled.logprobs
