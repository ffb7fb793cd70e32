"""What recorded decode steps read, and how little is launched around their graphs."""

from pathlib import Path

import pytest
import torch

from tests.helpers.examples import few
from tests.helpers.installed_triton import compile_for_gpus, needs_ptxas, needs_triton
from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.device_sampling import finish_on_device
from tests.model.execution.helpers.input_checks import check_inputs
from tests.model.execution.helpers.launch_count import REPLAY, CountingDevice, NotedRecorder
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, move_to_device
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tokasaurus.model.attention.backend import RecordedMemory
from tokasaurus.model.buffer_sizes import RECORDED_ROW_BYTES, RECORDED_TOKEN_BYTES
from tokasaurus.model.execution import device_batch, recorded_inputs
from tokasaurus.model.execution import runner as runner_module
from tokasaurus.model.execution.recorded_inputs import RecordedInputs

pytestmark = pytest.mark.cuda_path

PAGE_SIZE = 4


@few(2, ("seed", "num_rows", "page_size"), [(0, 1, 16), (1, 7, 4), (2, 40, 1), (3, 19, 16)])
def test_inputs_by_torch_equal_a_slow_oracle(seed: int, num_rows: int, page_size: int) -> None:
    check_inputs(seed, CPU, num_rows, page_size, recorded_inputs.fill_inputs_by_torch)


KERNELS = (
    ("_fill_row", {"HAS_LISTS": False}),
    ("_fill_row", {"HAS_LISTS": True}),
)
_LONG = ("slots", "positions", "kv_indices", "noise_keys", "last_tokens", "own_slots", "own_token_ids")
POINTERS = {
    **dict.fromkeys((*_LONG, "own_positions", "own_kv_indices", "own_noise_keys"), "*i64"),
    **dict.fromkeys(("kv_lengths", "tokens", "row_params", "tables", "own_params"), "*i32"),
    **dict.fromkeys(("starts", "blocks", "last_lengths", "new_blocks"), "*i32"),
}


@needs_triton
@needs_ptxas
@few(1, ("name", "constants"), KERNELS)
def test_the_kernel_compiles_for_each_architecture(name: str, constants: dict[str, object]) -> None:
    constants = {**constants, "NUM_PARAMS": 7, "PARAMS": 8, "PAGE_SIZE": 16, "BLOCK": 1024}
    compile_for_gpus("tokasaurus.model.execution.triton_inputs", name, POINTERS, constants, num_warps=4)


@few(1, "family", ["llama", "qwen2"])
def test_a_recorded_decode_step_launches_few_operations_around_its_graphs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one copy to the device and one from it, and the copy of FlashInfer's plan."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    save_tiny_model(tmp_path, family)
    device = CountingDevice()
    fill = device.one_launch("fill_inputs", recorded_inputs.fill_inputs_by_torch)
    monkeypatch.setattr(device_batch, "fill_inputs", fill)
    monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
    monkeypatch.setattr(runner_module, "draw_and_finish", finish_on_device)
    with torch.inference_mode(), device, one_thread():
        model, info = load(tmp_path)
        move_to_device(model)
        transfers = PretendTransfers()
        runner = make_runner(model, info, "flashinfer", PAGE_SIZE, device=DEVICE, transfers=transfers)
        runner.record_graphs(NotedRecorder(device), [4, 2])
        driver = StepDriver(runner, PAGE_SIZE, want_logprobs=False)
        for slot in (1, 2, 3):
            driver.open(slot, [5, slot, 7], temperature=1.0)
            driver.run([], [(slot, 3)])
        for _ in range(PAGE_SIZE):
            device.launches = launches = []
            num_copies = len(transfers.uploads), transfers.num_downloads
            driver.run([3, 1, 2], [])
            device.launches = None
            assert (len(transfers.uploads), transfers.num_downloads) == (num_copies[0] + 1, num_copies[1] + 1)
            assert launches == ["fill_inputs", REPLAY, REPLAY]


def test_the_inputs_have_as_many_bytes_as_planned() -> None:
    inputs = RecordedInputs.allocate(20, 30, RecordedMemory.allocate(20, 7, CPU), CPU)
    tensors = inputs.slots, inputs.token_ids, inputs.positions, inputs.noise_keys, inputs.device_params, *inputs.memory
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert num_bytes == 30 * RECORDED_TOKEN_BYTES + 20 * (RECORDED_ROW_BYTES + 7 * 4) + 4, (
        "and the end of the last row's blocks"
    )
