"""Rotary embedding by the kernels, against torch."""

import pytest
import torch

from tests.model.layers.test_linear import DTYPES, layer_kernels
from tokasaurus.checkpoint import RopeInfo
from tokasaurus.model.layers.rotary import RotaryTable, rotate

NUM_QUERY_HEADS = 4
NUM_KEY_HEADS = 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 16, 40, 64])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_the_kernel_norms_and_rotates_in_place_as_torch_does(
    num_rows: int, normed: bool, head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = RotaryTable(RopeInfo(1e4), head_dim, 1000, torch.device("cpu"))
    cos_sin = table.at(torch.randint(1000, (num_rows,), generator=generator))
    values = torch.randn(num_rows, NUM_KEY_HEADS, head_dim, generator=generator)
    rotated = torch.randn(num_rows, NUM_QUERY_HEADS + NUM_KEY_HEADS, head_dim, generator=generator)
    heads = torch.cat((rotated, values), dim=1).to(dtype)
    norms = None
    expected = heads[:, : NUM_QUERY_HEADS + NUM_KEY_HEADS]
    if normed:
        weights = torch.randn(2, head_dim, generator=generator).to(dtype)
        norms = (weights[0], weights[1])
        parts = expected.split((NUM_QUERY_HEADS, NUM_KEY_HEADS), dim=1)
        pairs = zip(parts, norms, strict=True)
        expected = torch.cat([torch.nn.functional.rms_norm(part, (head_dim,), w, 1e-5) for part, w in pairs], dim=1)
    expected = rotate(expected, cos_sin)
    values_before = heads[:, NUM_QUERY_HEADS + NUM_KEY_HEADS :].clone()

    layer_kernels().rotate(heads[:, : NUM_QUERY_HEADS + NUM_KEY_HEADS], NUM_QUERY_HEADS, cos_sin, norms, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(heads[:, : NUM_QUERY_HEADS + NUM_KEY_HEADS], expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(heads[:, NUM_QUERY_HEADS + NUM_KEY_HEADS :], values_before)
