"""The stopwatch of a CUDA device, and times between marks."""

import time

import pytest
import torch

from tokasaurus.messages.stages import StageBoard
from tokasaurus.model.execution.stage_times import StageTimes
from tokasaurus.model.staging.staging import CudaTransfers
from tokasaurus.model.worker.device import make_stopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_on_cuda_the_launches_of_short_kernels_do_not_count() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(16, device=device)

    def launch_many() -> None:
        for _ in range(100):
            x.add_(1)

    stopwatch = make_stopwatch(device)
    stopwatch.seconds(launch_many)
    start_s = time.perf_counter()
    launch_many()
    launching_s = time.perf_counter() - start_s
    assert 0 < min(stopwatch.seconds(launch_many) for _ in range(5)) < launching_s + 1e-4
    large = torch.zeros(1 << 28, device=device)
    assert stopwatch.seconds(lambda: large.add_(1)) > 1e-4, "2 GiB of memory traffic"


def test_marks_tell_how_long_the_device_waited() -> None:
    device = torch.device("cuda", 0)
    transfers = CudaTransfers(device)
    x = torch.zeros(1 << 24, device=device)
    x.add_(1)
    torch.cuda.synchronize()
    end = transfers.mark()
    time.sleep(0.05)
    begin = transfers.mark()
    x.add_(1)
    transfers.mark()
    torch.cuda.synchronize()
    assert 0.05 <= begin.seconds_since(end) < 1


def test_a_mark_is_reached_when_the_device_has_computed_what_was_launched_before() -> None:
    device = torch.device("cuda", 0)
    transfers = CudaTransfers(device)
    board = StageBoard(1)
    board.look()
    times = StageTimes(board, 0, transfers.mark)
    torch.cuda.synchronize()
    times.begin()
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    with times.waiting():
        torch.cuda._sleep(100_000_000)
    times.end()
    assert board.look()[0].num_steps == 0, "the device still computes"
    torch.cuda.synchronize()
    times.begin()
    times.end()
    (totals,) = board.look()
    assert totals.num_steps >= 1
    assert 1.5 * totals.waiting_seconds < totals.busy_seconds < 3 * totals.waiting_seconds
