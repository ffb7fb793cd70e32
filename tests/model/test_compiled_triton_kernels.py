"""Every Triton kernel that the package launches is compiled for GPUs by a test."""

import re
from pathlib import Path

import tokasaurus
from tests.model.attention.test_triton_kernels import KERNELS as ATTENTION
from tests.model.decoder.test_triton_layers import KERNELS as LAYERS
from tests.model.sampling.test_triton_sample import KERNELS as SAMPLING


def test_every_kernel_is_compiled_for_each_architecture() -> None:
    launched = set()
    for path in Path(tokasaurus.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        kernels = re.findall(r"^@triton\.jit.*\ndef (\w+)\(", text, re.MULTILINE)
        launched |= {name for name in kernels if f" {name}[" in text}
    assert len(launched) >= 12
    compiled = {name for name, *_ in (*ATTENTION.values(), *LAYERS.values())} | {kernel for _, kernel, *_ in SAMPLING}
    assert launched == compiled, "the table KERNELS of a test lacks a kernel, or has one that is gone"
