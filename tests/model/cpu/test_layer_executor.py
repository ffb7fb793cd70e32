"""All layers in one call of the kernels, against the same layers by torch with the reference backend."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.model.helpers.layer_specs import FAMILIES, random_layers
from tests.model.helpers.layer_stage import Layers, alike, check_stage
from tests.model.helpers.linear_layers import DTYPES
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, Group, Other, cases
from tokasaurus.checkpoint.spec import NormSpec

LAYERS = [alike(), alike(has_qkv_bias=True), alike(query_key_norm=NormSpec(1e-5)), *FAMILIES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("case", NAMED_CASES)
def test_layers_of_the_kernels_equal_torch_layers(case: Case, layers: Layers, dtype: torch.dtype) -> None:
    check_stage(dataclasses.replace(case, dtype=dtype), layers)


@examples(40)
@given(case=cases([16, 32]))
def test_layers_of_the_kernels_equal_torch_layers_on_random_steps(case: Case) -> None:
    check_stage(case, alike(query_key_norm=NormSpec(1e-5)))


@examples(300, 40)
@given(layers=random_layers(), number=st.integers(0, len(NAMED_CASES) - 1))
def test_random_layers_of_the_kernels_equal_torch_layers(layers: Layers, number: int) -> None:
    check_stage(NAMED_CASES[number], layers, float_tolerance=1e-4)


@examples(100, 10)
@given(layers=random_layers(), quantization=st.sampled_from(["int8", "int4"]))
def test_random_layers_with_quantised_weights_equal_the_modules(layers: Layers, quantization: str) -> None:
    check_stage(dataclasses.replace(NAMED_CASES[0], head_dim=64), layers, None, quantization, float_tolerance=1e-4)


@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 150, 700])
def test_layers_of_the_kernels_equal_torch_layers_on_one_prompt(num_tokens: int, head_dim: int) -> None:
    prompt = Case(16, 0, (Group(1, ((1, 0),)),), (), (Other(0, 0, num_tokens),), head_dim=head_dim)
    check_stage(prompt, alike())
