"""Runs the Triton kernel of experts in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

from tests.helpers.tiny_model import option_config, save_random_model
from tests.model.decoder.helpers.expert_cases import CASES, check
from tests.model.decoder.helpers.interpreted_low_rank import TOLERANCES, multiply_bfloat16
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load
from tests.model.helpers.steps import one_thread
from tokasaurus.model.decoder import experts, triton_experts
from tokasaurus.model.worker import kernel_checks


def check_experts(*names: str) -> None:
    for name in names or CASES:
        for dtype, tolerance in TOLERANCES.items():
            check(CASES[name], dtype, torch.device("cpu"), tolerance)


def check_model(family: str) -> None:
    """A whole model against transformers, and what a start compares."""
    with (
        tempfile.TemporaryDirectory() as directory,
        one_thread(),
        patch.object(experts, "grouped_product", triton_experts.multiply_groups),
        patch.object(kernel_checks, "grouped_product", triton_experts.multiply_groups),
    ):
        oracle = save_random_model(Path(directory), option_config(family, 0))
        assert_equals_oracle(Path(directory), oracle.eval(), "torch", seed=0)
        model, _ = load(Path(directory))
        measured = list(kernel_checks.compare_experts(model))
        assert len(measured) == 4
        assert all(one.is_right for one in measured), measured
        with patch.object(kernel_checks, "grouped_product", lambda x, weight, _: x @ weight[0].T):
            assert not any(one.is_right for one in kernel_checks.compare_experts(model))


def check_operation() -> None:
    """What a compiler is told of it; without Triton, each weight is multiplied by all rows."""
    arguments = torch.randn(5, 16), torch.randn(3, 8, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    torch.library.opcheck(experts.multiply_groups, arguments)
    expected = experts.product_by_masks(*arguments)
    assert torch.equal(experts.multiply_groups(*arguments), expected)
    with patch.object(experts, "uses_triton", lambda *_: True):
        torch.testing.assert_close(experts.multiply_groups(*arguments), expected)


if __name__ == "__main__":
    multiply_bfloat16()
    check_experts()
    check_operation()
    for each in ("qwen3_moe", "gpt_oss"):
        check_model(each)
    print("all equal")
