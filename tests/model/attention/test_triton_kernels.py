"""The Triton kernels of attention without a GPU: interpreted against slow oracles, and compiled for a GPU."""

import pytest
import torch

from tests.helpers.examples import few
from tests.helpers.installed_triton import (
    TRITON,
    compile_for_gpus,
    needs_interpreter,
    needs_ptxas,
    needs_triton,
    run_python,
)
from tokasaurus.model.triton_choice import uses_triton

pytestmark = pytest.mark.cuda_path

KERNELS = {
    "write": (
        "_write_token",
        {"FIRST_STORED": 16, "NUM_HEADS": 8, "HEAD_DIM": 128, "LARGEST": None, "BLOCK": 1024},
        {"key": "*bf16", "value": "*bf16", "keys": "*bf16", "values": "*bf16", "kv_indices": "*i64"},
    ),
    "write in float16": (
        "_write_token",
        {"FIRST_STORED": 16, "NUM_HEADS": 3, "HEAD_DIM": 80, "LARGEST": 65504.0, "BLOCK": 256},
        {"key": "*bf16", "value": "*bf16", "keys": "*fp16", "values": "*fp16", "kv_indices": "*i64"},
    ),
    "merge": (
        "_merge_rows",
        {"HEAD_DIM": 128, "ROWS": 16, "COLUMNS": 128, "IS_BASE_2": False},
        {"first": "*fp32", "first_lse": "*fp32", "second": "*fp32", "second_lse": "*fp32", "merged": "*bf16"},
    ),
    "merge in base 2": (
        "_merge_rows",
        {"HEAD_DIM": 128, "ROWS": 16, "COLUMNS": 128, "IS_BASE_2": True},
        {"first": "*bf16", "first_lse": "*fp32", "second": "*bf16", "second_lse": "*fp32", "merged": "*bf16"},
    ),
    "sinks": (
        "_add_sinks",
        {"NUM_HEADS": 9, "HEAD_DIM": 128, "ROWS": 16, "COLUMNS": 128},
        {"output": "*bf16", "lse": "*fp32", "sinks": "*fp32"},
    ),
    "lists": (
        "_list_blocks",
        {"PAGE_SIZE": 16, "BLOCK": 1024},
        {"tables": "*i32", "first_entries": "*i64", "kv_lengths": "*i32"}
        | {"starts": "*i32", "blocks": "*i32", "last_lengths": "*i32"},
    ),
}


@needs_triton
@needs_interpreter
@pytest.mark.long
def test_interpreted_kernels_equal_slow_oracles() -> None:
    assert run_python("-m", "tests.model.attention.helpers.interpreted_attention") == "all equal\n"


@needs_triton
@needs_ptxas
@few(1, "kind", KERNELS)
def test_the_kernels_compile_for_each_architecture(kind: str) -> None:
    name, constants, types = KERNELS[kind]
    compile_for_gpus("tokasaurus.model.attention.triton_kernels", name, types, constants, num_warps=4)


def test_plain_torch_serves_devices_other_than_cuda() -> None:
    assert not uses_triton(torch.device("cpu"), "attention")
    assert not uses_triton(torch.device("meta"), "attention")
    assert uses_triton(torch.device("cuda", 0), "attention") == (TRITON != (0, 0))
