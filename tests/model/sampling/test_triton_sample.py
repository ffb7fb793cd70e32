"""Sampling in Triton without a GPU: interpreted against torch and the C++ kernels, and compiled for a GPU."""

import os
import subprocess
import sys

import pytest

from tests.helpers.installed_triton import needs_interpreter, needs_triton

pytestmark = needs_triton

COMPILE = """
import importlib
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = getattr(importlib.import_module("tokasaurus.model.sampling.{module}"), "{kernel}")
types, constants = {types}, {constants}
signature = {{name: types.get(name, "constexpr") for name in kernel.arg_names}}
indexed = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = ASTSource(fn=kernel, signature=signature, constexprs=indexed)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 8}})
assert "sm_90" in compiled.asm["ptx"]
assert len(compiled.asm["cubin"]) > 1_000
"""

DRAW = {
    **{"first": "i32", "logits": "*bf16", "row_stride": "i32", "vocab_size": "i32", "params": "*i32"},
    "params_stride": "i32",
    **{"noise_keys": "*i64", "changed_index": "*i32", "changed_logits": "*fp32", "mask_index": "*i32"},
    **{"mask_bits": "*i32", "num_words": "i32", "tokens": "*i64", "chosen": "*fp32", "normalizers": "*fp32"},
}
DRAW_CONSTANTS = {"TEMPERATURE": 0, "TOP_P": 1, "TOP_K": 2, "MIN_P": 3, "BLOCK": 2048}
COUNT = {
    "first": "i32",
    **{"counts": "*i32", "vocab_size": "i32", "tokens": "*i32", "tables": "*i32", "table_stride": "i32"},
    **{"lengths": "*i32", "num_request_tokens": "*i32", "page_size": "i32"},
}
BIAS = {
    "first": "i32",
    "changed": "*fp32",
    "vocab_size": "i32",
    "starts": "*i64",
    "bias_ids": "*i32",
    "bias_values": "*fp32",
}
CHANGE = {
    **{"first": "i32", "logits": "*bf16", "row_stride": "i32", "vocab_size": "i32", "rows": "*i64", "params": "*i32"},
    **{"params_stride": "i32", "counts": "*i32", "changed": "*fp32"},
}
PARTS = {
    **{"logits": "*bf16", "row_stride": "i32", "vocab_size": "i32", "rows": "*i64", "candidates": "*i64"},
    "count": "i32",
}
CANDIDATES = {
    **{"candidates": "*i64", "num_candidates": "i32", "token_ids": "*i32", "values": "*fp32"},
    "count": "i32",
}


def run(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_interpreter
def test_interpreted_draws_equal_torch_and_the_kernels() -> None:
    assert run("-m", "tests.model.helpers.interpreted_sampling") == "all equal\n"


@pytest.mark.parametrize(
    ("module", "kernel", "types", "constants"),
    [
        ("triton_sample", "_draw_row", DRAW, {**DRAW_CONSTANTS, "HAS_CHANGED": False, "HAS_MASKS": False}),
        ("triton_sample", "_draw_row", DRAW, {**DRAW_CONSTANTS, "HAS_CHANGED": True, "HAS_MASKS": True}),
        ("triton_rules", "_count_tokens", COUNT, {"BLOCK": 1024}),
        ("triton_rules", "_add_biases", BIAS, {"BLOCK": 128}),
        ("triton_rules", "_change_rows", CHANGE, {"PRESENCE": 4, "FREQUENCY": 5, "REPETITION": 6, "BLOCK": 2048}),
        ("triton_top", "_largest_of_parts", PARTS, {"PART": 8192, "LARGEST_ID": 2**31 - 1}),
        ("triton_top", "_largest_of_candidates", CANDIDATES, {"NUM": 512, "LARGEST_ID": 2**31 - 1}),
    ],
)
def test_the_kernels_compile_for_hopper(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, int]
) -> None:
    """ptxas is a part of Triton's wheel."""
    run("-W", "ignore", "-c", COMPILE.format(module=module, kernel=kernel, types=types, constants=constants))
