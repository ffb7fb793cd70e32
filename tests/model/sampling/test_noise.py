"""Gumbel noise against its distribution."""

import numpy as np
import pytest
import torch

from tests.model.helpers.sampling_rows import noise_keys
from tokasaurus.model.sampling.noise import gumbel_noise


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(noise_keys(list(range(40)), [0] * 40, [3] * 40), 50_000).double().flatten()
    # Mean is Euler's constant, variance pi^2 / 6; 2 million draws put the estimates within 0.005.
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.01)
    for quantile in (0.001, 0.5, 0.999):
        below = float((noise < -np.log(-np.log(quantile))).double().mean())
        assert below == pytest.approx(quantile, abs=0.002)


def test_noise_differs_by_seed_sample_position_and_token_without_correlation() -> None:
    keys = noise_keys([1, 2, 1, 1], [0, 0, 1, 0], [9, 9, 9, 10])
    noise = gumbel_noise(keys, 50_000).double()
    correlations = torch.corrcoef(noise)
    off_diagonal = correlations[~torch.eye(4, dtype=torch.bool)]
    assert float(off_diagonal.abs().max()) < 0.03
    # Neither do two streams agree after a shift of the token ids.
    for shift in (1, 2, 77):
        assert abs(float(torch.corrcoef(torch.stack((noise[0, shift:], noise[1, :-shift])))[0, 1])) < 0.03
        assert abs(float(torch.corrcoef(torch.stack((noise[0, shift:], noise[0, :-shift])))[0, 1])) < 0.03
