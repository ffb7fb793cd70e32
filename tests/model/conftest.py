"""Kernels on several threads, though torch has one."""

import pytest

from tokasaurus.model.cpu.bindings import load_kernels


@pytest.fixture(autouse=True)
def kernels_share_their_work() -> None:
    kernels = load_kernels()
    if kernels is not None:
        kernels.set_num_threads(2)
