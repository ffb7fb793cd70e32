"""FlashInfer in CUDA graphs, in bfloat16: 80 sequences; GQA groups of 4, 7, 8; windows, sinks. Not yet run on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu.recorded_flashinfer import check_recorded_steps, save_model_with_group, save_model_with_windows
from tokasaurus.model.execution.graphs import CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("group", [4, 7, 8, None])
def test_recorded_steps_equal_eager_steps_with_torch_attention(group: int | None, tmp_path: Path) -> None:
    """None: two query heads a KV head, with windows and sinks."""
    pytest.importorskip("flashinfer", reason="pip install flashinfer-python")
    if group is None:
        save_model_with_windows(tmp_path)
    else:
        save_model_with_group(tmp_path, group)
    device = torch.device("cuda", 0)
    check_recorded_steps(tmp_path, CudaRecorder(device), device)
