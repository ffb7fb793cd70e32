"""The kernels use two threads, though torch has one."""

import pytest

from tokasaurus.model.cpu.bindings import load_kernels


@pytest.fixture(autouse=True)
def kernels_use_two_threads() -> None:
    kernels = load_kernels()
    if kernels is not None:
        kernels.set_num_threads(2)
