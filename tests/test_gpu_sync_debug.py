"""The check of tests/gpu/test_sync_debug_on_cuda.py, on the pretended device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.recorded_flashinfer import NUM_BLOCKS, NUM_SEQUENCES
from tests.gpu.steps_without_waits import check_no_step_waits
from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, Refused, move_to_device, pretended
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.model.execution.runner import ModelRunner

pytestmark = pytest.mark.cuda_path


def check(directory: Path, backend: str) -> int:
    """-> the number of steps that were guarded."""
    save_tiny_model(directory, "llama")
    num_guarded = 0

    def make() -> ModelRunner:
        model, info = load(directory)
        move_to_device(model)
        sizes = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SEQUENCES}
        return make_runner(model, info, backend, **sizes, device=DEVICE, transfers=PretendTransfers())

    @contextmanager
    def refusing() -> Iterator[None]:
        nonlocal num_guarded
        num_guarded += 1
        yield

    with one_thread(), pretended():  # all refuse, also those before that are not guarded
        check_no_step_waits(make, refusing)
    return num_guarded


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
@pytest.mark.long
def test_no_step_waits_for_the_device(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    assert check(tmp_path, backend) > 40


def test_a_step_that_reads_a_value_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelRunner._sample

    def read_first_token(runner: ModelRunner, *args: Any) -> Any:
        sampled = original(runner, *args)
        if len(sampled.tokens):
            int(sampled.tokens[0])
        return sampled

    monkeypatch.setattr(ModelRunner, "_sample", read_first_token)
    with pytest.raises(Refused, match="waits for values"):
        check(tmp_path, "torch")
