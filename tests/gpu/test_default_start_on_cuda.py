"""A server with every default at the shapes of Llama 3.2 1B and Llama 3.1 8B."""

from pathlib import Path

import pytest
import torch

from benchmarks.random_models import LLAMA_1B, LLAMA_8B, ModelShape
from tests.gpu.default_start import check_default_start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B], ids=["1b", "8b"])
def test_a_server_with_every_default_answers_and_stops(shape: ModelShape, tmp_path: Path) -> None:
    check_default_start(tmp_path, shape)
