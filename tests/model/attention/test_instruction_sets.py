"""The kernels for each instruction set of this machine except the best equal the reference, in attention alone and in
whole layers."""

import dataclasses

import pytest
import torch

from tests.model.helpers.layer_specs import FAMILIES
from tests.model.helpers.layer_stage import check_stage
from tests.model.helpers.paged_problems import CPU, Segment, attend_all
from tests.model.helpers.row_split_cases import NAMED_CASES, Case
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.cpu.build import INSTRUCTION_SETS, machine_sets

SEGMENTS = [Segment(1, 600), Segment(1, 33), Segment(70, 200), Segment(1, 1)]


@pytest.fixture(scope="module", params=dict.fromkeys(level.cpu_isa for level in INSTRUCTION_SETS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    supported = machine_sets()
    if request.param not in [level.cpu_isa for level in supported]:
        pytest.skip("this processor does not have it")
    if request.param == supported[0].cpu_isa:
        pytest.skip("all other tests use the best")
    loaded = load_kernels(request.param)
    assert loaded is not None
    loaded.set_num_threads(2)
    return loaded


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [
        (torch.float32, 64, True),
        (torch.float32, 80, False),
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 64, False),
        (torch.bfloat16, 80, True),
        (torch.int8, 16, True),
        (torch.int8, 64, True),
        (torch.int8, 80, False),
    ],
)
def test_kernels_for_other_processors_equal_the_reference(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, causal: bool
) -> None:
    layers = tuple(
        AttentionSpec(9, 3, head_dim, scale, window=window, softcap=softcap)
        for scale, window, softcap in ((head_dim**-0.5, None, None), (0.2, 50, None), (0.5, 17, 3.0))
    )
    activation_dtype = torch.float32 if dtype == torch.int8 else None
    sinks = (None, torch.linspace(-2, 3, 9), None)
    shape = KVShape(3, 9, 3, head_dim, 16, dtype, CPU, activation_dtype, layers, sinks)
    for layer in range(3):
        check_equal(shape, causal, layer, kernels)


def check_equal(shape: KVShape, causal: bool, layer: int, kernels: Kernels) -> None:
    output, lse = attend_all("cpu", shape, SEGMENTS, causal, layer, seed=6, kernels=kernels)
    expected, expected_lse = attend_all("reference", shape, SEGMENTS, causal, layer, seed=6)
    # Without bfloat16 dot products, everything is computed in float32 and only the output is rounded.
    tolerance = {"atol": 1e-5, "rtol": 2**-7} if shape.query_dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    of_lse = {"atol": 1e-5, "rtol": 1e-5}
    if kernels.has_bfloat16_arithmetic and shape.dtype != torch.float32:  # weights are rounded; of int8, queries too
        tolerance, of_lse = {"atol": 0.02, "rtol": 2**-7}, {"atol": 0.02, "rtol": 1e-5}
    elif shape.dtype == torch.int8:  # queries and weights may be rounded to integers of 16 bits
        tolerance = of_lse = {"atol": 5e-4, "rtol": 1e-5}
    torch.testing.assert_close(output, expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse, **of_lse)


@pytest.mark.parametrize("case", NAMED_CASES[2:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_for_other_processors_equal_torch_layers(kernels: Kernels, dtype: torch.dtype, case: Case) -> None:
    limited = dataclasses.replace(case, dtype=dtype, window=30, softcap=4.0, has_sinks=True)
    for layers in FAMILIES:
        check_stage(limited, layers, kernels)
