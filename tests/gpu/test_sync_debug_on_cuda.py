"""Whole steps while torch refuses calls that make the host wait for the device. Not yet run on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.recorded_flashinfer import bfloat16_runner, save_model_with_group
from tests.gpu.steps_without_waits import check_no_step_waits
from tokasaurus.model.buffer_sizes import graph_sizes
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@contextmanager
def refusing() -> Iterator[None]:
    """Of torch's own calls; waiting for an event is allowed, and what libraries call is not seen."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_mode_refuses_to_read_a_value() -> None:
    x = torch.ones(4, device="cuda")
    with refusing(), pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_no_step_waits_for_the_device(backend: str, has_graphs: bool, tmp_path: Path) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer", reason="pip install flashinfer-python")
    device = torch.device("cuda", 0)
    save_model_with_group(tmp_path, 4)

    def make_runner() -> ModelRunner:
        runner = bfloat16_runner(tmp_path, backend, device)
        if has_graphs:
            runner.record_graphs(CudaRecorder(device), graph_sizes(16, 4), chunk_sizes=[64, 32])
        return runner

    check_no_step_waits(make_runner, refusing)
