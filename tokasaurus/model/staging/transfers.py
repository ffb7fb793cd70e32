"""Memory, asynchronous copies and events of a device."""

import time
from typing import Protocol

import torch
from torch import Tensor

# N bytes


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait on the host until the work before this point is done."""


class Mark(Protocol):
    """A point in the computation, and when the device reached it."""

    def seconds_since(self, earlier: "Mark") -> float:
        """From `earlier` to here; waits for neither: the device must have passed both."""


class Transfers(Protocol):
    """Copies between the host and a device that computes on one stream, in the order of the calls."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that asynchronous copies can use: uint8 [N]."""

    def on_device(self, num_bytes: int) -> Tensor:
        """Device memory: uint8 [N]."""

    def upload(self, source: Tensor, target: Tensor, after: Event) -> Event:
        """Start copying pinned `source` to the device beside its computation, once the device has passed `after`.

        Computation that starts later waits for the copy. Returns the end of the copy; neither call waits on the host.
        """

    def download(self, source: Tensor, target: Tensor) -> Event:
        """Start copying from the device to pinned `target`, after the computation so far. Returns the copy's end."""

    def record(self) -> Event:
        """The end of the computation so far."""

    def mark(self) -> Mark:
        """The end of the computation so far, with its time."""


class HostMark:
    """A mark of a CPU, which has computed everything that was called."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self._at_s - earlier._at_s


class CudaMark:
    """An event that keeps its time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaTransfers:
    """Uploads run on a stream of their own; downloads follow the computation on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, source: Tensor, target: Tensor, after: Event) -> Event:
        assert isinstance(after, torch.cuda.Event)
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(after)
            target.copy_(source, non_blocking=True)
            end = self.record()
        torch.cuda.current_stream(self._device).wait_event(end)
        return end

    def download(self, source: Tensor, target: Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        return self.record()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> CudaMark:
        return CudaMark(self._device)
