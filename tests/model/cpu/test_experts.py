"""Products of the experts of a layer: those of each expert alone, and a plain formula."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.model.helpers.linear_layers import assert_close, random_rows
from tests.model.helpers.quantized_rows import block_size, random_block_rows
from tokasaurus.model.cpu import experts as experts_module
from tokasaurus.model.cpu.experts import ExpertWeights, PackedExperts
from tokasaurus.model.cpu.layer_executor import BlockWeight, LayerKernels, PackedWeights

NUM_EXPERTS = 5
COUNTS = ([1, 0, 0, 1, 1], [0, 0, 37, 0, 0], [3, 2, 40, 0, 7], [6, 7, 0, 1, 90], [0, 0, 0, 0, 1], [700, 1, 0, 2, 3])
"""Rows of each expert: with empty ones, with one that gets all, and with more rows than the caches have room for."""


def starts_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def assert_equals_each_alone(kernels: LayerKernels, weights: Sequence[Tensor | BlockWeight], is_gated: bool) -> None:
    """Bit for bit."""
    together = ExpertWeights(kernels, weights, is_gated, "silu" if is_gated else None)
    for counts in COUNTS:
        starts = starts_of(counts)
        x = random_rows(sum(counts), together.packed[0].in_size, together.packed[0].activation_dtype)
        product = together.multiply(x, starts)
        for packed, first, end in zip(together.packed, starts.tolist(), starts[1:].tolist(), strict=False):
            if first < end:
                assert torch.equal(product[first:end], packed.multiply(x[first:end])), counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_gated", [False, True])
def test_plain_weights(kernels: LayerKernels, dtype: torch.dtype, is_gated: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(74, 96).to(dtype) for _ in range(NUM_EXPERTS)]
    assert_equals_each_alone(kernels, weights, is_gated)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("types", [["Q4_1"] * NUM_EXPERTS, ["Q6_K", "Q4_K", "Q8_0", "Q4_K", "Q5_0"]])
def test_quantised_weights(kernels: LayerKernels, types: list[str], is_int8: bool) -> None:
    """Each expert has its own type, as files of mixed types may have."""
    rows = [random_block_rows(each, 64, 512 // block_size(each)) for each in types]
    weights = [BlockWeight(512, torch.bfloat16, (each,), is_int8) for each in rows]
    for is_gated in (False, True):
        assert_equals_each_alone(kernels, weights, is_gated)


def test_no_rows(kernels: LayerKernels) -> None:
    weights = ExpertWeights(kernels, [torch.randn(32, 64)] * NUM_EXPERTS)
    assert weights.multiply(torch.empty(0, 64), starts_of([0] * NUM_EXPERTS)).shape == (0, 32)


@pytest.mark.parametrize("num_tokens", [1, 3, 64])
def test_experts_equal_the_plain_formula(kernels: LayerKernels, num_tokens: int) -> None:
    """In float64, each token by itself."""
    torch.manual_seed(num_tokens)
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * 40, 64), torch.randn(NUM_EXPERTS, 64, 40)
    x, weights = torch.randn(num_tokens, 64), torch.rand(num_tokens, 3)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in range(num_tokens)])
    expected = torch.zeros(num_tokens, 64, dtype=torch.float64)
    for token in range(num_tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (down[expert].double() @ (functional.silu(gate) * up))
    packed_down = ExpertWeights(kernels, [*down])
    by_kernels = PackedExperts(ExpertWeights(kernels, [*gate_up], True, "silu"), packed_down, None)
    assert_close(by_kernels(x, chosen, weights), expected)

    def gate(features: Tensor) -> Tensor:
        gates, ups = features.chunk(2, dim=-1)
        return functional.silu(gates) * ups

    by_function = PackedExperts(ExpertWeights(kernels, [*gate_up]), packed_down, gate)
    assert_close(by_function(x, chosen, weights), expected)


def test_a_token_does_not_depend_on_the_others(kernels: LayerKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many are computed at a time."""
    torch.manual_seed(1)
    gate_up, down = torch.randn(9, 2 * 64, 64), torch.randn(9, 64, 64)
    experts = PackedExperts(
        ExpertWeights(kernels, [*gate_up.bfloat16()], True, "silu"), ExpertWeights(kernels, [*down.bfloat16()]), None
    )
    x = random_rows(33, 64, PackedWeights(kernels, down[0].bfloat16(), None).activation_dtype)
    chosen, weights = torch.stack([torch.randperm(9)[:8] for _ in range(33)]), torch.rand(33, 8)
    together = experts(x, chosen, weights)
    alone = torch.cat([experts(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(33)])
    assert torch.equal(together, alone)
    monkeypatch.setattr(experts_module, "MAX_ROWS", 100)
    assert torch.equal(experts(x, chosen, weights), together)
