"""What adapters add to gemms, in each instruction set, against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.model.helpers.linear_layers import DTYPES, assert_close, random_rows
from tests.model.helpers.quantized_rows import random_block_rows
from tokasaurus.model.cpu.bindings import HugePageTensors
from tokasaurus.model.cpu.layer_executor import BlockWeight, LayerKernels, PackedWeights
from tokasaurus.model.cpu.low_rank import LowRankRows, PackedAdapters

NUM_ADAPTERS = 5


def random_adapter(rows: list[tuple[int, int, int]], in_size: int, dtype: torch.dtype) -> list[LowRankRows]:
    """rows: (first output, outputs, ranks) of each part."""
    generator = torch.Generator().manual_seed(in_size)
    ups = [torch.randn(count, ranks, generator=generator) / ranks for _, count, ranks in rows]
    return [
        LowRankRows(first, random_rows(ranks, in_size, dtype), up.to(dtype).float())
        for (first, _, ranks), up in zip(rows, ups, strict=True)
    ]


def added(x: Tensor, parts: list[LowRankRows], num_outputs: int) -> Tensor:
    """In float64, but for the numbers between the two products, which are rounded as activations are."""
    out = torch.zeros(len(x), num_outputs, dtype=torch.float64)
    for part in parts:
        outputs = slice(part.first_row, part.first_row + len(part.up))
        inner = (x.double() @ part.down.double().T).to(x.dtype).double()
        out[:, outputs] += inner @ part.up.double().T
    return out


@pytest.fixture
def adapters_of_rows() -> Tensor:
    """Runs of rows with one adapter, some longer than a tile, and rows without."""
    runs = [(1, 40), (0, 3), (2, 1), (3, 13), (1, 1), (4, 12), (5, 3), (0, 1), (2, 30)]
    return torch.from_numpy(np.repeat(*np.array(runs).T).astype(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_size", [6, 94, 160, 4128])
def test_each_row_gets_what_its_own_adapter_adds(
    kernels: LayerKernels, adapters_of_rows: Tensor, in_size: int, dtype: torch.dtype
) -> None:
    num_outputs = 75
    weight, bias = random_rows(num_outputs, in_size, dtype), torch.randn(num_outputs)
    packed = PackedWeights(kernels, weight, bias)
    adapters = PackedAdapters(packed, dtype, NUM_ADAPTERS)
    parts = {
        1: random_adapter([(0, 40, 16), (40, 20, 3), (60, 15, 8)], in_size, dtype),
        2: random_adapter([(33, 7, 1)], in_size, dtype),  # other outputs stay as they are
        3: random_adapter([(0, 75, 70)], in_size, dtype),
        4: random_adapter([(0, 20, 8), (50, 25, 4)], in_size, dtype),  # fewer vectors of ranks than a panel
    }  # number 5 is nobody's
    for number, own in parts.items():
        adapters.place(number, adapters.pack(own, HugePageTensors()))
    x = random_rows(len(adapters_of_rows), in_size, packed.activation_dtype)
    x[50] = torch.nan  # of no other row's business
    together = packed.multiply(x, adapters=(adapters.address, adapters_of_rows))
    expected = x.double() @ weight.double().T + bias.double()
    for number, own in parts.items():
        expected[adapters_of_rows == number] += added(x[adapters_of_rows == number], own, num_outputs)
    is_finite = torch.arange(len(x)) != 50
    assert_close(together[is_finite], expected[is_finite])
    assert together[50].isnan().all()
    for first, end in ((0, 1), (38, 60), (60, 61), (100, 101)):
        some = slice(first, end)
        alone = packed.multiply(x[some], adapters=(adapters.address, adapters_of_rows[some]))
        assert torch.equal(alone[is_finite[some]], together[some][is_finite[some]])
    plain = packed.multiply(x)
    without = (adapters_of_rows == 0) | (adapters_of_rows == 5)
    assert torch.equal(together[without & is_finite], plain[without & is_finite])
    adapters.place(1, None)
    again = packed.multiply(x, adapters=(adapters.address, adapters_of_rows))
    is_first = adapters_of_rows == 1
    assert torch.equal(again[is_first], plain[is_first])
    assert not torch.equal(plain[is_first], together[is_first])
    assert torch.equal(again[~is_first & is_finite], together[~is_first & is_finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_ups_have_their_own_ranks_before_the_activation(kernels: LayerKernels, dtype: torch.dtype) -> None:
    width, in_size = 45, 64
    weight = random_rows(2 * width, in_size, dtype)
    packed = PackedWeights(kernels, weight, None, is_gated=True, activation="silu")
    adapters = PackedAdapters(packed, dtype, 2)
    both = random_adapter([(0, width, 5), (width, width, 16)], in_size, dtype)
    adapters.place(1, adapters.pack(both, HugePageTensors()))
    adapters.place(2, adapters.pack(both[1:], HugePageTensors()))
    x = random_rows(20, in_size, packed.activation_dtype)
    numbers = torch.tensor([1] * 9 + [2] * 11, dtype=torch.int32)
    features = x.double() @ weight.double().T
    features[:9] += added(x[:9], both, 2 * width)
    features[9:] += added(x[9:], both[1:], 2 * width)
    gates, ups = features.to(x.dtype).double().chunk(2, dim=1)  # rounded as if they were stored
    activated = functional.silu(gates).to(x.dtype).double()
    assert_close(packed.multiply(x, adapters=(adapters.address, numbers)), activated * ups)


@pytest.mark.parametrize("num_rows", [1, 5, 30])
def test_adapters_of_quantised_weights_are_plain(kernels: LayerKernels, num_rows: int) -> None:
    blocks = random_block_rows("Q4_1", 64, 4)
    packed = PackedWeights(kernels, BlockWeight(128, torch.bfloat16, (blocks,)), None)
    adapters = PackedAdapters(packed, torch.bfloat16, 1)
    parts = random_adapter([(0, 64, 16)], 128, torch.bfloat16)
    adapters.place(1, adapters.pack(parts, HugePageTensors()))
    x = random_rows(num_rows, 128, packed.activation_dtype)
    numbers = torch.ones(num_rows, dtype=torch.int32)
    expected = x.double() @ blocks.dequantized().double().T + added(x, parts, 64)
    assert_close(packed.multiply(x, adapters=(adapters.address, numbers)), expected)
