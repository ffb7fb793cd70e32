"""Gemms with plain weights, in each instruction set."""

import pytest
import torch

from tests.model.helpers.linear_layers import DTYPES, assert_close, random_rows
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights

NUM_ROWS = [1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 70]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_size", [6, 32, 94, 160, 4128])  # the last: in parts
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


def test_of_many_rows_and_inputs_each_is_as_alone(kernels: LayerKernels) -> None:
    """More rows than are in tiles at a time, and more inputs than are multiplied at a time."""
    packed = PackedWeights(kernels, random_rows(45, 2080, torch.bfloat16), None)
    x = random_rows(2101, 2080, packed.activation_dtype)
    together = packed.multiply(x)
    for rows in (slice(0, 1), slice(2040, 2060), slice(2095, 2101)):
        assert torch.equal(packed.multiply(x[rows]), together[rows])
