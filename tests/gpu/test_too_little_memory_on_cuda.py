"""Starts on a CUDA device without enough memory, or for a KV cache that is too large for it."""

from pathlib import Path

import pytest
import torch

from benchmarks.random_models import ModelShape, write_model
from tests.gpu.killed_worker import SMALL
from tests.gpu.too_little_memory import check_allowed_cache, check_refused_cache, failed_start, held_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
GIGABYTE = ModelShape("1 GB shape", 128_256, 2048, 8192, 4, 32, 8, 64, is_tied=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    write_model(directory, GIGABYTE)
    return directory


@pytest.mark.parametrize("left_mib", [200, 1000, 1900])
def test_a_start_beside_a_process_that_has_the_memory_says_so(left_mib: int, large: Path) -> None:
    """What is left is too little for CUDA itself, for the weights, or for forwards."""
    with held_device(left_mib):
        reason = failed_start(large, "device=cuda")
    assert "memory" in reason


def test_a_cache_that_is_too_large_is_refused_and_the_largest_works(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    bound = check_refused_cache(tmp_path, "device=cuda")  # by the launcher, which knows the device's whole memory
    most = check_refused_cache(tmp_path, "device=cuda", num_tokens=bound)  # by the worker, which has measured
    check_allowed_cache(tmp_path, most * 98 // 100, "device=cuda")  # the free memory of two starts differs a little
