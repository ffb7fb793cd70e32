"""Pipeline stages on one CUDA device, which they share in turns: eager, compiled and with graphs. Nothing passes NCCL,
which needs a device for each rank, and no speed can be measured."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model
from tests.model.execution.helpers.joined_stages import assert_equals_whole_model, join_stages
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.graphs import CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("family", "pp_size"), [("llama", 2), ("qwen3", 3)])
def test_stages_give_the_tokens_of_the_whole_model(
    family: str, pp_size: int, compiled: bool, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, family)
    device = torch.device("cuda", 0)
    compilers = [Compiler() for _ in range(pp_size)] if compiled else None
    stages = join_stages(tmp_path, pp_size, "torch", monkeypatch, device, compilers)
    if has_graphs:
        stages.record_graphs([CudaRecorder(device) for _ in range(pp_size)])
    assert_equals_whole_model(stages, tmp_path, device)
