"""The checks of tests/gpu/test_killed_worker_on_cuda.py and test_too_little_memory_on_cuda.py, on the CPU."""

import sys
from pathlib import Path

import pytest

from benchmarks.random_models import TINY, write_model
from tests.gpu.killed_worker import check_killed_worker
from tests.gpu.too_little_memory import check_allowed_cache, check_refused_cache, failed_start

pytestmark = pytest.mark.cuda_path

CPU = ("device=cpu", "max_seqs_per_forward=16", "max_tokens_per_forward=256")


@pytest.mark.long
def test_a_killed_worker_starts_again_and_no_answer_is_lost(tmp_path: Path) -> None:
    check_killed_worker(tmp_path, *CPU, "kv_cache_num_tokens=32768", num_tokens=1500, restart_limit_s=120)


@pytest.mark.long
def test_a_cache_that_is_too_large_is_refused_and_a_smaller_one_works(tmp_path: Path) -> None:
    """Not the largest, which would take the memory of this machine."""
    write_model(tmp_path, TINY)
    most = check_refused_cache(tmp_path, *CPU)
    check_allowed_cache(tmp_path, min(4096, most), *CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.long
def test_a_start_without_memory_says_so_in_one_line(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    limited = ["sh", "-c", 'ulimit -v 1000000 && exec "$@"', "sh"]
    assert "not enough memory (ulimit -v " in failed_start(tmp_path, *CPU, prefix=limited)
