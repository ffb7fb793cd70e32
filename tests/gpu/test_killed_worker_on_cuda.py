"""kill -9 of a model worker under load, on a CUDA device."""

from pathlib import Path

import pytest
import torch

from tests.gpu.killed_worker import check_killed_worker


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_killed_worker_starts_again_and_no_answer_is_lost(tmp_path: Path) -> None:
    """The server's own choices: FlashInfer, where it is installed, graphs and compiled layers."""
    check_killed_worker(
        *(tmp_path, "device=cuda", "max_seqs_per_forward=64", "max_tokens_per_forward=2048"),
        num_tokens=4000,
        restart_limit_s=150,
        free_bytes=lambda: torch.cuda.mem_get_info()[0],
    )
