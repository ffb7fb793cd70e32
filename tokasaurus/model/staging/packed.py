"""All arrays of a step in one pinned buffer, sent by one asynchronous copy; all its results in another."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.buffer_sizes import RING_SIZE, BufferSizes
from tokasaurus.model.staging.staging import NUMPY_DTYPES, Event, Transfers

# N bytes of a buffer


_ALIGNMENT = 16
"""Bytes: each array starts at a multiple, as vectorised loads need it."""

logger = logging.getLogger(__name__)


class PackedStaging:
    """Implements Staging for a device with memory of its own.

    Each buffer is a pair of pinned and device memory. A pinned buffer is written again only after its copy has ended,
    and device memory only after the step that reads it; with RING_SIZE buffers and one step queued behind the running
    one, the host never waits for either. A step that does not fit takes several copies, each from another buffer, which
    stays for later steps: no buffer ever moves.
    """

    def __init__(self, transfers: Transfers, num_bytes: int = BufferSizes().inputs) -> None:
        self._transfers = transfers
        self._ring = [[_Buffer(transfers, num_bytes)] for _ in range(RING_SIZE)]
        self._turn = 0
        self._index = 0  # among the buffers of this turn
        self._used = 0
        self._is_sent = False
        self._work: list[Callable[[], object]] = []

    def begin(self) -> None:
        self._turn = (self._turn + 1) % RING_SIZE
        for buffer in self._ring[self._turn]:
            buffer.wait_until_free()
        self._index = 0
        self._used = 0
        self._is_sent = False
        self._work.clear()  # of a step that failed

    def to_device(self, array: NDArray[Any]) -> Tensor:
        assert not self._is_sent, "arrays are staged before they are sent"
        if self._used + array.nbytes > self._ring[self._turn][self._index].num_bytes:
            self._continue_in_next_buffer(array.nbytes)
        buffer, start = self._ring[self._turn][self._index], self._used
        self._used += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return buffer.write(array, start)

    def then(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def send(self) -> None:
        self._upload()
        self._is_sent = True
        work, self._work = self._work, []
        for launch in work:
            launch()

    def finish(self) -> None:
        read = self._transfers.record()
        for buffer in self._ring[self._turn][: self._index + 1]:
            buffer.read = read

    def _upload(self) -> None:
        if self._used:
            self._ring[self._turn][self._index].upload(self._transfers, self._used)

    def _continue_in_next_buffer(self, num_bytes: int) -> None:
        """Send what is staged so far; what follows, at least num_bytes, goes to the turn's next buffer."""
        self._upload()
        buffers = self._ring[self._turn]
        size = buffers[self._index].num_bytes
        self._index += 1
        self._used = 0
        if self._index == len(buffers) or buffers[self._index].num_bytes < num_bytes:
            buffers.insert(self._index, _Buffer(self._transfers, max(2 * size, num_bytes)))
            logger.info("a step's inputs do not fit in %s bytes: %s more", size, buffers[self._index].num_bytes)


class _Buffer:
    """Pinned memory and as much device memory, read as tensors and arrays of each dtype."""

    def __init__(self, transfers: Transfers, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._pinned = transfers.pinned(self.num_bytes)
        self._on_device = transfers.on_device(self.num_bytes)
        host = self._pinned.numpy()
        self._arrays = {dtype: host.view(dtype) for dtype in NUMPY_DTYPES.values()}
        self._tensors = {dtype: self._on_device.view(kind) for kind, dtype in NUMPY_DTYPES.items()}
        self._copied: Event | None = None
        self.read = transfers.record()
        """Event after the work that reads the device memory, or that used it before it became this buffer's."""

    def write(self, array: NDArray[Any], start: int) -> Tensor:
        """array: at least 1-dimensional, of a dtype of NUMPY_DTYPES. start: byte offset."""
        first = start // array.itemsize
        self._arrays[array.dtype][first : first + array.size] = array.reshape(-1)
        flat = self._tensors[array.dtype].narrow(0, first, array.size)
        return flat if array.ndim == 1 else flat.view(array.shape)

    def upload(self, transfers: Transfers, num_bytes: int) -> None:
        self._copied = transfers.upload(self._pinned[:num_bytes], self._on_device[:num_bytes], self.read)

    def wait_until_free(self) -> None:
        """Wait until the pinned memory may be written."""
        if self._copied is not None:
            self._copied.synchronize()


class Fetched(Protocol):
    """Tensors on their way from the device."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Waits until they have arrived. The arrays are not overwritten later."""


class Results(Protocol):
    """Brings the results of steps to the host."""

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        """Start copying tensors, whose dtypes are in NUMPY_DTYPES, after the computation so far."""


class HostResults:
    """Implements Results for tensors on the host: nothing is copied."""

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        return HostArrays({name: tensor.numpy() for name, tensor in tensors.items()})


class PackedResults:
    """Implements Results for a device with memory of its own: one copy for all tensors of a step, or for its only one.

    A step's results are taken out of the pinned memory before a later step gets the same buffer.
    """

    def __init__(self, transfers: Transfers, num_bytes: int = BufferSizes().results) -> None:
        self._transfers = transfers
        self._pinned = [transfers.pinned(num_bytes) for _ in range(RING_SIZE)]
        self._fetched: list[_Packed | None] = [None] * RING_SIZE
        self._index = 0

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        self._index = (self._index + 1) % RING_SIZE
        before = self._fetched[self._index]
        if before is not None:
            before.arrays()
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        num_bytes = packed.numel()
        if len(self._pinned[self._index]) < num_bytes:
            self._pinned[self._index] = self._transfers.pinned(2 * num_bytes)
        target = self._pinned[self._index][:num_bytes]
        fetched = _Packed(tensors, target, self._transfers.download(packed, target))
        self._fetched[self._index] = fetched
        return fetched


class HostArrays:
    """Implements Fetched for arrays that are there."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def arrays(self) -> dict[str, NDArray[Any]]:
        return self._arrays


class _Packed:
    def __init__(self, tensors: Mapping[str, Tensor], pinned: Tensor, copied: Event) -> None:
        self._kinds = {name: (NUMPY_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
        self._pinned: Tensor | None = pinned
        self._copied = copied
        self._arrays: dict[str, NDArray[Any]] = {}

    def arrays(self) -> dict[str, NDArray[Any]]:
        if self._pinned is not None:
            self._copied.synchronize()
            content = self._pinned.numpy().copy()
            self._pinned = None
            start = 0
            for name, (dtype, shape) in self._kinds.items():
                end = start + dtype.itemsize * int(np.prod(shape))
                self._arrays[name] = content[start:end].view(dtype).reshape(shape)
                start = end
        return self._arrays
