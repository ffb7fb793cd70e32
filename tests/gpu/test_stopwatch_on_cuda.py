"""The stopwatch of a CUDA device."""

import time

import pytest
import torch

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
