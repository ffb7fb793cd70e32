"""Every Triton kernel that the package launches is compiled for GPUs by a test."""

import re
from pathlib import Path

import pytest

import tokasaurus

pytestmark = pytest.mark.cuda_path

TESTS = Path(__file__).parent


def test_every_kernel_is_compiled_for_each_architecture() -> None:
    launched = set()
    for path in Path(tokasaurus.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        kernels = re.findall(r"^@triton\.jit.*\ndef (\w+)\(", text, re.MULTILINE)
        launched |= {name for name in kernels if f" {name}[" in text}
    assert len(launched) >= 12
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    compiling = "".join(text for text in texts if "compile_for_gpus(" in text)
    missing = {name for name in launched if f'"{name}",' not in compiling}
    assert not missing, "no test compiles them: add them to the KERNELS of a test"
