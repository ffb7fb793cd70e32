"""Runs the Triton kernels of adapters in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.model.decoder.helpers.low_rank_cases import CASES, KINDS, check

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""The interpreter truncates float32 to bfloat16, where a GPU rounds."""


def multiply_bfloat16() -> None:
    """The interpreter's products take the bits of bfloat16 for integers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot_of_any(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *arguments)

    interpreter.InterpreterBuilder.create_dot = create_dot_of_any


def check_low_rank(*names: str) -> None:
    multiply_bfloat16()
    for name in names or CASES:
        for dtype, tolerance in TOLERANCES.items():
            for kind in KINDS:
                check(CASES[name], kind, dtype, torch.device("cpu"), tolerance)


if __name__ == "__main__":
    torch.set_num_threads(1)
    multiply_bfloat16()
    check_low_rank()
    print("all equal")
