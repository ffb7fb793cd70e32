"""Masked draws and token logprobs on a CUDA device, against the CPU."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.model.helpers.sampling_rows import make_rows, noise_keys, on_device, staged_masks, token_logprobs_of
from tests.model.sampling.helpers.logprobs_as_sampled import ALONE, check, make_case, mixes
from tokasaurus.model.sampling.sample import Sampled, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE = "cuda"


def test_masked_draws_equal_the_cpu() -> None:
    logits = torch.randn(100, 1003, generator=torch.Generator().manual_seed(0)) * 3
    keys = noise_keys(list(range(100)), [0] * 100, [1] * 100)
    allowed = np.random.default_rng(0).random((100, 1003)) < 0.2
    rows = dataclasses.replace(
        make_rows([0.0, 1.0] * 50, [1.0, 1.0, 1.0, 0.9] * 25, keys), masks=staged_masks(dict(enumerate(allowed)))
    )
    drawn = sample(logits.to(DEVICE), on_device(rows, torch.device(DEVICE)), None).tokens.cpu()
    assert allowed[np.arange(100), drawn.numpy()].all()
    assert (drawn == sample(logits, rows, None).tokens).float().mean() >= 0.98


def test_logprobs_of_the_distribution_drawn_from_are_exact() -> None:
    case = make_case([*ALONE, *mixes(0, 100)])
    sampled = sample(case.logits.to(DEVICE), on_device(case.rows, torch.device(DEVICE)), None)
    check(case, Sampled(*(tensor.cpu() for tensor in sampled if tensor is not None)))


def test_token_logprobs_equal_the_cpu() -> None:
    logits = torch.randn(150, 1003, generator=torch.Generator().manual_seed(0)) * 3
    targets = torch.arange(150)
    computed = token_logprobs_of(logits.to(DEVICE), targets.to(DEVICE), 5, None)
    for got, expected in zip(computed, token_logprobs_of(logits, targets, 5, None), strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)
