"""Which version of Triton is installed, and what its kernels' tests need."""

from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    TRITON = tuple(int(part) for part in version("triton").split(".")[:2])
except PackageNotFoundError:
    TRITON = (0, 0)

needs_triton = pytest.mark.skipif(TRITON == (0, 0), reason="Triton is not installed: it has wheels for Linux alone")
needs_interpreter = pytest.mark.skipif(
    TRITON < (3, 9), reason="the interpreter of Triton before 3.9 fails on NumPy 2.4, or Triton is not installed"
)
