"""All layers in one call of the kernels, against the same layers by torch with the reference backend."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.helpers.examples import examples
from tests.model.helpers.layer_stage import check_stage
from tests.model.helpers.linear_layers import DTYPES
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, Group, Other, cases
from tokasaurus.checkpoint.spec import NormSpec


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"has_qkv_bias": True}, {"query_key_norm": NormSpec(1e-5)}])
@pytest.mark.parametrize("case", NAMED_CASES)
def test_layers_of_the_kernels_equal_torch_layers(case: Case, options: dict[str, Any], dtype: torch.dtype) -> None:
    check_stage(dataclasses.replace(case, dtype=dtype), options)


@examples(40)
@given(case=cases([16, 32]))
def test_layers_of_the_kernels_equal_torch_layers_on_random_steps(case: Case) -> None:
    check_stage(case, {"query_key_norm": NormSpec(1e-5)})


@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 150, 700])
def test_layers_of_the_kernels_equal_torch_layers_on_one_prompt(num_tokens: int, head_dim: int) -> None:
    prompt = Case(16, 0, (Group(1, ((1, 0),)),), (), (Other(0, 0, num_tokens),), head_dim=head_dim)
    check_stage(prompt, {})
