"""How the results of a step return to the host: all by one asynchronous copy."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.staging.packed import RING_SIZE
from tokasaurus.model.staging.sizes import BufferSizes
from tokasaurus.model.staging.staging import NUMPY_DTYPES
from tokasaurus.model.staging.transfers import Event, Transfers


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
        return _OnHost(tensors)


class PackedResults:
    """Implements Results for a device with memory of its own: one copy for all tensors of a step.

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
        packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
        num_bytes = packed.numel()
        if len(self._pinned[self._index]) < num_bytes:
            self._pinned[self._index] = self._transfers.pinned(2 * num_bytes)
        target = self._pinned[self._index][:num_bytes]
        fetched = _Packed(tensors, target, self._transfers.download(packed, target))
        self._fetched[self._index] = fetched
        return fetched


class _OnHost:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


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
