"""Runs the Triton kernel of experts in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from tests.helpers.tiny_model import option_config, save_random_model
from tests.model.decoder.helpers.expert_cases import CASES, ROUTERS, check, check_choice, check_sort
from tests.model.decoder.helpers.interpreted_low_rank import TOLERANCES, multiply_bfloat16
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load
from tests.model.helpers.steps import one_thread
from tokasaurus.model.decoder import experts, triton_experts
from tokasaurus.model.decoder.experts import sort_by_torch
from tokasaurus.model.worker import kernel_checks


def check_experts(*names: str) -> None:
    for name in names or CASES:
        for dtype, tolerance in TOLERANCES.items():
            check(CASES[name], dtype, torch.device("cpu"), tolerance)


def check_routers(count: int = len(ROUTERS)) -> None:
    for spec in ROUTERS[-count:]:
        check_choice(spec, torch.device("cpu"))
    for num_rows, num_experts in ((0, 3), (1, 1), (2500, 5)):
        check_sort(num_rows, num_experts, torch.device("cpu"))


def check_model(family: str) -> None:
    """A whole model against transformers, and what a start compares."""
    with (
        tempfile.TemporaryDirectory() as directory,
        one_thread(),
        ExitStack() as stack,
    ):
        kernels = {"grouped_product": "multiply_groups", "choose_experts": "choose", "sort_rows": "sort_rows"}
        for (name, kernel), module in itertools.product(kernels.items(), (experts, kernel_checks)):
            stack.enter_context(patch.object(module, name, getattr(triton_experts, kernel)))
        oracle = save_random_model(Path(directory), option_config(family, 0))
        assert_equals_oracle(Path(directory), oracle.eval(), "torch", seed=0)
        model, _ = load(Path(directory))
        measured = list(kernel_checks.compare_experts(model))
        assert len(measured) == 2 * 4 + 4
        assert all(one.is_right for one in measured), measured
        with patch.object(kernel_checks, "grouped_product", lambda x, weight, _: x @ weight[0].T):
            assert not any(one.is_right for one in [*kernel_checks.compare_experts(model)][8:])
        with patch.object(kernel_checks, "sort_rows", lambda rows, count: sort_by_torch(rows.flip(0), count)):
            assert sum(one.is_right for one in kernel_checks.compare_experts(model)) < len(measured)


def check_operations() -> None:
    """What a compiler is told of them; without Triton, each weight is multiplied by all rows."""
    arguments = torch.randn(5, 16), torch.randn(3, 8, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    torch.library.opcheck(experts.multiply_groups, arguments)
    torch.library.opcheck(experts.sort_on_cuda, (torch.tensor([2, 0, 2]), 3))
    torch.library.opcheck(experts.choose_on_cuda, (arguments[0], None, 2, "softmax", True, 0.0, 1.0))
    expected = experts.product_by_masks(*arguments)
    assert torch.equal(experts.multiply_groups(*arguments), expected)
    with patch.object(experts, "uses_triton", lambda *_: True):
        torch.testing.assert_close(experts.multiply_groups(*arguments), expected)


if __name__ == "__main__":
    multiply_bfloat16()
    check_experts()
    check_operations()
    check_routers()
    for each in ("qwen3_moe", "gpt_oss"):
        check_model(each)
    print("all equal")
