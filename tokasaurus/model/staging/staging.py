"""How the host arrays of a step reach the device.

One step: `begin`; `to_device` and `then` in any order; `send`, before which no staged tensor may be read by the device;
the forward; `finish`. Transfers are the memory, asynchronous copies and events of a device.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# N bytes

NUMPY_DTYPES = {getattr(torch, name): np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32")}
"""Dtypes of tensors that can be staged and fetched."""


class Staging(Protocol):
    """Brings host arrays to the device, for one step after another."""

    def begin(self) -> None:
        """Start a step. Tensors that were staged for earlier steps may be overwritten by later ones."""

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """array: of a dtype of NUMPY_DTYPES and any shape -> a tensor of this dtype and shape on the device.

        The tensor has the array's contents once `send` has been called.
        """

    def then(self, work: Callable[[], object]) -> None:
        """Launch `work`, which may read staged tensors, as soon as they are sent; calls run in order."""

    def send(self) -> None:
        """Send all staged arrays, then launch all work. Does not wait for either."""

    def finish(self) -> None:
        """All device work that reads this step's staged tensors has been launched."""


class DirectStaging:
    """Each array by itself: without a copy to a CPU, and with a blocking copy to any other device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        pass

    def to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def then(self, work: Callable[[], object]) -> None:
        work()

    def send(self) -> None:
        pass

    def finish(self) -> None:
        pass


ON_HOST = DirectStaging(torch.device("cpu"))
"""Staged tensors are the arrays themselves."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait on the host until the work before this point is done."""


class Mark(Protocol):
    """A point in the computation, and when the device reached it."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds from `earlier` to here; waits for neither: the device must have passed both."""

    def is_reached(self) -> bool:
        """Whether the device has passed it."""


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

    def is_reached(self) -> bool:
        return True


class CudaMark:
    """An event that keeps its time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


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
