"""Gemms with quantised weights: those of the dequantised weights, which the gguf library computes."""

import pytest
import torch
from torch import Tensor

from tests.model.helpers.linear_layers import DTYPES, assert_close, random_rows
from tests.model.helpers.quantized_rows import block_size, plain_rows, quantized_rows, random_block_rows, set_codes
from tokasaurus.model.cpu.bindings import BLOCK_TYPES
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedWeights

NUM_ROWS = [150, 70, 33, 31, 13, 12, 7, 3, 2, 1]
FEW_ROWS = 6
"""Up to so many, weights that need not be float32 may be multiplied in integers, whose sums round otherwise."""


def check(
    kernels: LayerKernels,
    parts: list[BlockRows],
    dtype: torch.dtype,
    bias: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """The results of the dequantised weights, which are not rounded; with float32, bit for bit those of packed ones. A
    row's result does not depend on the number of rows, apart from few ones."""
    plain = torch.cat([plain_rows(part) for part in parts])
    in_size = plain.shape[1]
    weight = BlockWeight(in_size, dtype, tuple(parts))
    assert PackedWeights.fits(weight, kernels.panel_size, is_gated)
    quantized = PackedWeights(kernels, weight, bias, is_gated)
    activation_dtype = kernels.activation_dtype(dtype)
    packed = PackedWeights(kernels, plain, bias, is_gated)
    together = quantized.multiply(random_rows(NUM_ROWS[0], in_size, activation_dtype))
    for num_rows in NUM_ROWS:
        x = random_rows(NUM_ROWS[0], in_size, activation_dtype)[:num_rows]
        product = quantized.multiply(x)
        assert product.dtype == activation_dtype
        if dtype == torch.float32:
            assert torch.equal(product, packed.multiply(x))
        if is_gated:
            gates, ups = (x.double() @ each.double().T for each in plain.chunk(2))
            assert_close(product, gates * ups)
        else:
            assert_unrounded(product, x, plain, bias)
        if num_rows > FEW_ROWS:
            assert torch.equal(product, together[:num_rows])
    if bias is None and not is_gated:
        indices = torch.tensor([0, len(plain) - 1, len(plain) // 2])
        assert torch.equal(quantized.rows(indices), plain[indices].to(activation_dtype))


def assert_unrounded(product: Tensor, x: Tensor, plain: Tensor, bias: Tensor | None) -> None:
    """Products of numbers that are not rounded, but for the result; rounding the weights to bfloat16 would show."""
    expected = x.double() @ plain.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ plain.double().abs().T  # of what the sum adds up
    limit = 5e-7 * magnitude
    if product.dtype == torch.bfloat16:  # and half the distance of two adjacent numbers
        limit = 1e-7 * magnitude + 2.0 ** (expected.abs().frexp().exponent - 9)
    assert bool(((product.double() - expected).abs() <= limit).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_each_type_of_blocks_equals_its_dequantised_weights(
    kernels: LayerKernels, block_type: str, dtype: torch.dtype
) -> None:
    num_blocks = 11 if block_size(block_type) == 32 else 3
    check(kernels, [random_block_rows(block_type, 77, num_blocks)], dtype)  # not a multiple of a panel


@pytest.mark.parametrize(("block_type", "num_blocks"), [("Q4_1", 66), ("Q8_0", 200), ("Q4_K", 17), ("Q6_K", 9)])
def test_more_inputs_than_are_multiplied_at_a_time(kernels: LayerKernels, block_type: str, num_blocks: int) -> None:
    check(kernels, [random_block_rows(block_type, 77, num_blocks)], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_layers_of_several_types_with_a_bias(kernels: LayerKernels, dtype: torch.dtype) -> None:
    parts = [random_block_rows(kind, 64, 1, seed) for seed, kind in enumerate(["Q4_K", "Q4_K", "Q6_K"])]
    check(kernels, parts, dtype, torch.randn(192))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_type", ["Q4_1", "Q6_K"])
def test_gated_layers(kernels: LayerKernels, block_type: str, dtype: torch.dtype) -> None:
    check(kernels, [random_block_rows(block_type, 45, 3, seed) for seed in (1, 2)], dtype, is_gated=True)


def test_panels_of_two_types_do_not_fit(kernels: LayerKernels) -> None:
    size = kernels.panel_size
    q4, q8 = (random_block_rows(kind, 2 * size, 1) for kind in ("Q4_0", "Q8_0"))
    odd = BlockRows("Q4_0", q4.blocks[: size + 1])
    assert PackedWeights.fits(BlockWeight(32, torch.float32, (q4, q8)), size)
    assert not PackedWeights.fits(BlockWeight(32, torch.float32, (odd, q8)), size)
    assert not PackedWeights.fits(BlockWeight(32, torch.float32, (q4, q8)), size, is_gated=True)


def rows_without_ties(num_rows: int, in_size: int) -> Tensor:
    """Random rows of which no number lies in the middle between two codes, where rounding errors would decide."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-126, 127, (num_rows, in_size), generator=generator).float()
    codes += torch.rand(codes.shape, generator=generator) * 0.4 - 0.2
    codes[:, ::32] = 127
    return codes * torch.rand((num_rows, 1), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", [1, 5])
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_products_in_integers_are_those_of_quantised_activations(
    kernels: LayerKernels, block_type: str, num_blocks: int, dtype: torch.dtype
) -> None:
    rows = random_block_rows(block_type, 77, num_blocks)
    plain, bias = plain_rows(rows), torch.randn(77)
    in_size = plain.shape[1]
    weights = PackedWeights(kernels, BlockWeight(in_size, dtype, (rows,), is_int8=True), bias)
    x = rows_without_ties(150, in_size).to(kernels.activation_dtype(dtype))
    x[3] = 0
    x[4, 32:64] = 0
    together = weights.multiply(x)
    expected = quantized_rows(x, 128 if block_type == "I8" else 32) @ plain.double().T + bias.double()
    error = float((together.double() - expected).abs().max() / expected.abs().max())
    # codes and mins have products of opposite signs, which are larger than their sum
    assert error < (2e-5 if together.dtype == torch.float32 else 2**-8)
    for num_rows in (1, 2, 5, 31):  # a row's result does not depend on the others
        assert torch.equal(weights.multiply(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_products_of_the_largest_numbers_fit(kernels: LayerKernels, block_type: str, byte: int) -> None:
    """All codes are the least or the largest that the type has, all activations of a row the largest of one sign."""
    rows = random_block_rows(block_type, 40, 3)
    codes = set_codes(rows, byte)
    plain = plain_rows(codes)
    weights = PackedWeights(kernels, BlockWeight(plain.shape[1], torch.float32, (codes,), is_int8=True), None)
    x = torch.ones(2, plain.shape[1])
    x[1] = -1
    expected = x.double() @ plain.double().T
    magnitude = plain.double().abs().sum(1).max()
    assert float((weights.multiply(x).double() - expected).abs().max()) < 1e-5 * float(magnitude)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_unrounded_products_of_the_largest_numbers_fit(kernels: LayerKernels, block_type: str, byte: int) -> None:
    """As above, with activations whose every byte is the largest or the least."""
    codes = set_codes(random_block_rows(block_type, 40, 3), byte)
    plain = plain_rows(codes)
    weights = PackedWeights(kernels, BlockWeight(plain.shape[1], torch.bfloat16, (codes,)), None)
    for integer in (0x7F7F7F, 0x7F0000 - 0x8080, 0x7F7FFF, 1 << 22):
        for sign in (1, -1):
            x = torch.full((2, plain.shape[1]), sign * integer / 2**23).to(weights.activation_dtype)
            x[1, ::2] *= -1
            assert_unrounded(weights.multiply(x), x, plain, None)


def test_unrounded_products_of_numbers_of_every_size(kernels: LayerKernels) -> None:
    """Activations between the smallest and the largest, in one block or with one size in each block; and all zeros."""
    rows = random_block_rows("Q4_1", 40, 3)
    plain = plain_rows(rows)
    weights = PackedWeights(kernels, BlockWeight(96, torch.bfloat16, (rows,)), None)
    generator = torch.Generator().manual_seed(5)
    for exponents in (
        torch.randint(-60, 60, (96,), generator=generator),
        torch.tensor([-60, 0, 60])[:, None].repeat(1, 32).view(-1),
    ):
        x = (torch.randn(1, 96, generator=generator) * 2.0**exponents).to(weights.activation_dtype)
        assert_unrounded(weights.multiply(x), x, plain, None)
    assert not weights.multiply(torch.zeros(1, 96, dtype=weights.activation_dtype)).any()


def test_types_whose_activations_have_other_scales_do_not_mix(kernels: LayerKernels) -> None:
    size = kernels.panel_size
    parts = random_block_rows("Q8_0", size, 1), random_block_rows("I8", size, 1)
    assert PackedWeights.fits(BlockWeight(32, torch.float32, parts), size)
    assert not PackedWeights.fits(BlockWeight(32, torch.float32, parts, is_int8=True), size)


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("block_type", ["Q4_1", "Q6_K", "I8"])
def test_rows_that_are_not_finite_stay_so_in_integers(kernels: LayerKernels, block_type: str, is_int8: bool) -> None:
    rows = random_block_rows(block_type, 40, 3)
    in_size = plain_rows(rows).shape[1]
    weights = PackedWeights(kernels, BlockWeight(in_size, torch.bfloat16, (rows,), is_int8), None)
    for number in (torch.nan, torch.inf, -torch.inf):
        x = random_rows(2, in_size, weights.activation_dtype)
        x[0, 40] = number
        found = weights.multiply(x)
        assert found[0].isnan().all()
        assert torch.equal(found[1:], weights.multiply(x[1:]))
