"""What a start says of the two ways to multiply by quantised weights."""

import pytest
import torch

from tests.model.helpers.linear_layers import DTYPES, layer_kernels
from tests.model.helpers.quantized_rows import plain_rows, quantized_rows, random_block_rows
from tokasaurus.model.cpu.bindings import BLOCK_TYPES
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedWeights
from tokasaurus.model.cpu.quantized_ways import FEW_ROWS, MANY_ROWS, ways_by_type


def packed(kernels: LayerKernels, rows: list[BlockRows], dtype: torch.dtype, **options: bool) -> PackedWeights:
    in_size = plain_rows(rows[0]).shape[1]
    return PackedWeights(
        kernels, BlockWeight(in_size, dtype, tuple(rows)), torch.randn(len(rows) * len(rows[0].blocks)), **options
    )


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_errors_are_those_against_float64(block_type: str, dtype: torch.dtype, is_int8: bool) -> None:
    """Whichever of the two ways the weights use. Here, products of 8 bits are those of rounded activations."""
    rows = random_block_rows(block_type, 300, 4)
    plain = plain_rows(rows)[:256].double()
    weights = PackedWeights(layer_kernels(), BlockWeight(plain.shape[1], dtype, (rows,), is_int8), torch.randn(300))
    x = torch.randn((MANY_ROWS, plain.shape[1]), generator=torch.Generator().manual_seed(0)).to(
        weights.activation_dtype
    )
    x = x[:FEW_ROWS]
    exact = x.double() @ plain.T
    rounded = quantized_rows(x, 128 if block_type == "I8" else 32) @ plain.T
    expected = float((rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    ways = ways_by_type([weights])[block_type]
    rounding = 0.0 if weights.activation_dtype == torch.float32 else 2**-8
    assert ways.int8_error == pytest.approx(expected, rel=1e-2, abs=rounding)
    assert ways.exact_error < 2e-6 + rounding
    assert ways.few_time > 0
    assert ways.many_time > 0
    assert weights.struct.is_int8 == is_int8  # as before


def test_what_cannot_be_compared_is_left_out() -> None:
    kernels = layer_kernels()
    size = kernels.panel_size
    q4, q8 = (random_block_rows(name, size, 1) for name in ("Q4_0", "Q8_0"))
    mixed, gated = packed(kernels, [q4, q8], torch.float32), packed(kernels, [q8, q8], torch.float32, is_gated=True)
    plain = PackedWeights(kernels, torch.randn(size, 32), None)
    assert ways_by_type([mixed, gated, plain]) == {}
    assert list(ways_by_type([mixed, packed(kernels, [q8], torch.float32), packed(kernels, [q4], torch.float32)])) == [
        "Q4_0",
        "Q8_0",
    ]
