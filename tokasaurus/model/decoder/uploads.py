"""Copies of weights to a device through two pinned buffers.

A copy from memory that is not pinned, such as a mapped file, goes through small buffers of the driver, which one thread
fills. Here all threads of torch fill one buffer while the device fetches the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from tokasaurus.model.staging.staging import CudaTransfers, Event, Transfers

BUFFER_BYTES = 64 << 20
"""Size of each of the two buffers: a millisecond or more on any bus, beside which starting a copy takes no time."""


class Uploads:
    """Copies host tensors to a device, in the order of the calls."""

    def __init__(self, transfers: Transfers, buffer_bytes: int = BUFFER_BYTES) -> None:
        """buffer_bytes: a multiple of the size of a number of each dtype."""
        self._transfers = transfers
        self._buffers = [transfers.pinned(buffer_bytes) for _ in range(2)]
        self._fetched: list[Event | None] = [None, None]
        """The end of the last copy from each buffer."""
        self._index = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying `source`, on the host, to `target`, on the device: of the same shape, and of any dtype.

        The source has been read when the call returns. Work that is launched on the device later waits for the copy.
        """
        assert target.shape == source.shape
        # The smaller of both dtypes is sent. To narrow numbers costs the threads nothing, since they wait for memory.
        # Other conversions would, between float16 and bfloat16 most of all, and are left to the device.
        dtype = target.dtype if target.itemsize < source.itemsize else source.dtype
        for part, place in _parts(source, target, len(self._buffers[0]) // dtype.itemsize):
            self._send(part, place, dtype)

    def _send(self, source: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        buffer, fetched = self._buffers[self._index], self._fetched[self._index]
        if fetched is not None:
            fetched.synchronize()
        staged = _read_as(buffer, source.shape, dtype)
        staged.copy_(source)
        is_converted = dtype != target.dtype
        arrived = _read_as(self._transfers.on_device(staged.nbytes), source.shape, dtype) if is_converted else target
        # `arrived` may be memory that work launched before still reads, such as the last conversion.
        self._fetched[self._index] = self._transfers.upload(staged, arrived, self._transfers.record())
        if is_converted:
            target.copy_(arrived)
        self._index = 1 - self._index

    def finish(self) -> None:
        """Wait for the copies. Raises RuntimeError if the device has failed."""
        for event in self._fetched:
            if event is not None:
                event.synchronize()


@contextmanager
def uploads_to(device: torch.device) -> Iterator[Uploads | None]:
    """None for a CPU. At the end, also after an error, no copy is on its way."""
    if device.type != "cuda":
        yield None
        return
    uploads = Uploads(CudaTransfers(device))
    try:
        yield uploads
    finally:
        uploads.finish()


def _read_as(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The beginning of `memory`, uint8 [N], as a tensor."""
    return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _parts(source: Tensor, target: Tensor, max_numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both, of equal shapes and at most max_numbers, in order."""
    if source.numel() == 0:
        return
    if source.numel() <= max_numbers:
        yield source, target
    elif (row_size := source[0].numel()) <= max_numbers:
        num_rows = max_numbers // row_size
        yield from zip(torch.split(source, num_rows), torch.split(target, num_rows), strict=True)
    else:
        for part, place in zip(source, target, strict=True):
            yield from _parts(part, place, max_numbers)
