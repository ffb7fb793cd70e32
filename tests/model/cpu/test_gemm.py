"""Gemms with plain weights, in each instruction set."""

import pytest
import torch

from tests.model.helpers.linear_layers import DTYPES, assert_close, random_rows
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights

NUM_ROWS = [1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 70]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_size", [6, 32, 94, 160])
def test_a_row_is_the_sum_of_products_whatever_the_number_of_rows(
    kernels: LayerKernels, in_size: int, dtype: torch.dtype
) -> None:
    weight, bias = random_rows(45, in_size, dtype), torch.randn(45)
    packed = PackedWeights(kernels, weight, bias)
    x = random_rows(NUM_ROWS[-1] + 1, in_size, packed.activation_dtype)
    x[-1] = torch.nan  # of no row's business
    together = packed.multiply(x)
    assert_close(together[:-1], x[:-1].double() @ weight.double().T + bias.double())
    assert together[-1].isnan().all()
    for num_rows in NUM_ROWS:
        assert torch.equal(packed.multiply(x[:num_rows]), together[:num_rows])
