"""The decoder on a CUDA device against transformers on the CPU, in float32."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_mixed_batches_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = save_tiny_model(tmp_path, family)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=1, device=torch.device("cuda"))
