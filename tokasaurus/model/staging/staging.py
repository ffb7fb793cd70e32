"""How the host arrays of a step reach the device.

One step: `begin`; `to_device` and `then` in any order; `send`, before which no staged tensor may be read by the device;
the forward; `finish`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
