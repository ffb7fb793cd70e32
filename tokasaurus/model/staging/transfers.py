"""Memory, asynchronous copies and events of a device."""

from typing import Protocol

import torch
from torch import Tensor

# N bytes


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait on the host until the work before this point is done."""


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
