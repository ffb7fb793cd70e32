"""Time a call on a device, without the time for which Python launches it."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

_NUM_FILLING_GEMMS = 16
_FILLING_SIZE = 4096
"""Gemms of 4,096 cubed keep the fastest GPUs busy for 0.2 ms each, and the launch of one takes about 0.01 ms."""


class Stopwatch(Protocol):
    """Times calls on one device."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds for which the device computes what `call` launches."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch by events on CUDA, by the process's clock elsewhere."""
    return _EventStopwatch(device) if device.type == "cuda" else _ClockStopwatch()


class _ClockStopwatch:
    """On a CPU, a call computes before it returns."""

    def seconds(self, call: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s


class _EventStopwatch:
    """Two CUDA events around the call's kernels. Other work is queued before them, so that all of them are launched
    before the first one starts: otherwise the device would wait for Python between short kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factor = torch.zeros((_FILLING_SIZE, _FILLING_SIZE), dtype=torch.bfloat16, device=device)
        self._product = torch.zeros_like(self._factor)

    def seconds(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            for _ in range(_NUM_FILLING_GEMMS):
                torch.mm(self._factor, self._factor, out=self._product)
            start.record()
            call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
