"""FlashInfer inside CUDA graphs in bfloat16, 80 sequences, GQA groups of 4, 7 and 8. Not yet run on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu.recorded_flashinfer import check_recorded_steps
from tokasaurus.model.execution.graphs import CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("group", [4, 7, 8])
def test_recorded_steps_equal_eager_steps_with_torch_attention(group: int, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", reason="pip install flashinfer-python")
    device = torch.device("cuda", 0)
    check_recorded_steps(tmp_path, group, CudaRecorder(device), device)
