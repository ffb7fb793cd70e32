"""The Triton sampler without a GPU: interpreted against torch and the C++ kernels, and compiled for a GPU."""

import os
import subprocess
import sys

import pytest

from tests.helpers.installed_triton import needs_interpreter, needs_triton

pytestmark = needs_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokasaurus.model.sampling.triton_sample import _draw_row as kernel

constants = dict(HAS_CHANGED={flag}, HAS_MASKS={flag}, TEMPERATURE=0, TOP_P=1, TOP_K=2, MIN_P=3, BLOCK=2048)
types = dict(
    logits="*bf16", row_stride="i32", vocab_size="i32", params="*i32", params_stride="i32", noise_keys="*i64",
    changed_index="*i32", changed_logits="*fp32", mask_index="*i32", mask_bits="*i32", num_words="i32",
    tokens="*i64", chosen="*fp32", normalizers="*fp32",
)
signature = {{name: types.get(name, "constexpr") for name in kernel.arg_names}}
indexed = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
source = ASTSource(fn=kernel, signature=signature, constexprs=indexed)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 8}})
assert "sm_90" in compiled.asm["ptx"]
assert len(compiled.asm["cubin"]) > 10_000
"""


def run(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_interpreter
def test_interpreted_draws_equal_torch_and_the_kernels() -> None:
    assert run("-m", "tests.model.helpers.interpreted_sampling") == "all equal\n"


@pytest.mark.parametrize("flag", [False, True])
def test_the_kernel_compiles_for_hopper(flag: bool) -> None:
    """ptxas is a part of Triton's wheel."""
    run("-W", "ignore", "-c", COMPILE.format(flag=flag))
