"""Which version of Triton is installed; processes that interpret its kernels or compile them for a GPU."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

try:
    TRITON = tuple(int(part) for part in version("triton").split(".")[:2])
except PackageNotFoundError:
    TRITON = (0, 0)

needs_triton = pytest.mark.skipif(TRITON == (0, 0), reason="Triton is not installed: it has wheels for Linux alone")
needs_interpreter = pytest.mark.skipif(
    TRITON < (3, 9), reason="the interpreter of Triton before 3.9 fails on NumPy 2.4, or Triton is not installed"
)


def _has_ptxas() -> bool:
    found = find_spec("triton")
    return found is not None and (Path(str(found.origin)).parent / "backends/nvidia/bin/ptxas").exists()


needs_ptxas = pytest.mark.skipif(not _has_ptxas(), reason="no ptxas beside Triton")

ARCHITECTURES = (80, 90, 100)

_COMPILE = """
import importlib
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

kernel = getattr(importlib.import_module({module!r}), {kernel!r})
pointers, constants = {pointers!r}, {constants!r}
signature = {{name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}}
indexed = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend)
arguments = dict.fromkeys(kernel.arg_names, 7)
assert bind(**arguments)[0] == arguments, "a launch binds arguments by a function whose own names they must not have"
source = ASTSource(fn=kernel, signature=signature, constexprs=indexed)
for architecture in {architectures}:
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={{"num_warps": {num_warps}}})
    assert f"sm_{{architecture}}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1_000
    assert compiled.metadata.shared <= 163 * 1024, "no block has more shared memory on an A100"
"""


def run_python(*arguments: str) -> str:
    """Run Python without Triton's interpreter, unless the code itself asks for it -> what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compile_for_gpus(
    module: str, kernel: str, pointers: dict[str, str], constants: dict[str, object], num_warps: int
) -> None:
    """Compile a kernel as an A100, an H100 and a B200 would. pointers: the types of the arguments that are no int32.
    Needs ptxas, a part of Triton's wheel."""
    code = _COMPILE.format(
        module=module,
        kernel=kernel,
        pointers=pointers,
        constants=constants,
        num_warps=num_warps,
        architectures=ARCHITECTURES,
    )
    run_python("-W", "ignore", "-c", code)
