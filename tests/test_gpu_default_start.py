"""The check of tests/gpu/test_default_start_on_cuda.py, with a tiny model on the CPU."""

from pathlib import Path

import pytest

from benchmarks.random_models import TINY
from tests.gpu.default_start import check_default_start


@pytest.mark.long
def test_a_tiny_server_with_every_default_answers_and_stops(tmp_path: Path) -> None:
    check_default_start(tmp_path, TINY, "device=cpu", "kv_cache_num_tokens=16384")
