"""NCCL and symmetric memory with one rank: sums inside CUDA graphs, and a quick end once these are dropped. Not yet run
on a GPU."""

import pytest
import torch

from tests.gpu.one_rank import check_one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_a_recorded_sum_is_replayed_and_the_process_ends_within_seconds() -> None:
    check_one_rank("cuda", exit_limit_s=5.0)
