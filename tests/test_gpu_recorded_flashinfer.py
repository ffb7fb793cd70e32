"""The check of tests/gpu/test_recorded_flashinfer_on_cuda.py, over the CPU doubles of FlashInfer and of CUDA graphs."""

from pathlib import Path

import pytest

from tests.gpu.recorded_flashinfer import (
    TOLERANCE,
    check_recorded_steps,
    save_model_with_group,
    save_model_with_windows,
)
from tests.helpers.examples import few
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.launch_tape import LaunchTape
from tests.model.helpers.pretend_device import HostTransfers
from tests.model.helpers.steps import CPU, one_thread
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.execution import recorded_inputs

pytestmark = pytest.mark.cuda_path


@few(1, "group", [4, 7, 8])
def test_recorded_steps_equal_eager_steps_with_torch_attention(
    group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_double.install(monkeypatch)
    tape = LaunchTape()
    save_model_with_group(tmp_path, group)
    with one_thread():
        assert 0 < check_recorded_steps(tmp_path, tape, CPU, HostTransfers()) < TOLERANCE / 3
    num_graphs = 4 * ((2 + 1 + 1) + 1) + (2 + 1)
    assert len(tape.graphs) == num_graphs, (
        "around two layers' attention, its LM head; with attention; steps with prompts"
    )


def test_recorded_steps_with_windows_and_sinks_do_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch)
    save_model_with_windows(tmp_path)
    with one_thread():
        assert 0 < check_recorded_steps(tmp_path, LaunchTape(), CPU, HostTransfers()) < TOLERANCE / 3


def test_recorded_steps_without_their_sinks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch)
    monkeypatch.setattr(flashinfer_backend, "count_sinks", lambda *_: None)
    save_model_with_windows(tmp_path)
    with one_thread(), pytest.raises(AssertionError, match="log-probability"):
        check_recorded_steps(tmp_path, LaunchTape(), CPU, HostTransfers())


def test_a_recording_that_reads_old_contexts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch)
    monkeypatch.setattr(recorded_inputs, "fill_lists_by_torch", lambda *_: None)
    save_model_with_group(tmp_path, 4)
    with one_thread(), pytest.raises(AssertionError, match="log-probability"):
        check_recorded_steps(tmp_path, LaunchTape(), CPU, HostTransfers())
