"""The check of tests/gpu/test_recorded_flashinfer_on_cuda.py, over the CPU doubles of FlashInfer and of CUDA graphs."""

from pathlib import Path

import pytest

from tests.gpu.recorded_flashinfer import TOLERANCE, check_recorded_steps
from tests.helpers.examples import few
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.launch_tape import LaunchTape
from tests.model.helpers.pretend_device import HostTransfers
from tests.model.helpers.steps import CPU, one_thread
from tokasaurus.model.execution import recorded_inputs

pytestmark = pytest.mark.cuda_path


@few(1, "group", [4, 7, 8])
def test_recorded_steps_equal_eager_steps_with_torch_attention(
    group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_double.install(monkeypatch)
    tape = LaunchTape()
    with one_thread():
        assert 0 < check_recorded_steps(tmp_path, group, tape, CPU, HostTransfers()) < TOLERANCE / 3
    num_graphs = 4 * ((2 + 1 + 1) + 1) + (2 + 1)
    assert len(tape.graphs) == num_graphs, (
        "around two layers' attention, its LM head; with attention; steps with prompts"
    )


def test_a_recording_that_reads_old_contexts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch)
    monkeypatch.setattr(recorded_inputs, "fill_lists_by_torch", lambda *_: None)
    with one_thread(), pytest.raises(AssertionError, match="log-probability"):
        check_recorded_steps(tmp_path, 4, LaunchTape(), CPU, HostTransfers())
