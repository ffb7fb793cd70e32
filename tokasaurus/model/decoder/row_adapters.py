"""Which rows of a forward have which adapter, and what adapters add to the outputs of linear layers in plain torch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.cpu.low_rank import LowRankRows

# T rows


class RowAdapters:
    """The adapters of the rows that a model's modules compute next. Numbers are from 1 on; 0 is none."""

    def __init__(self, num_adapters: int) -> None:
        """num_adapters: most at a time."""
        self.num_adapters = num_adapters
        self.numbers: Tensor | None = None
        """int32 [T], on the host; None if no row has an adapter."""
        self.outside_layers: set[int] = set()
        """Numbers of adapters that change embeddings or logits."""
        self._rows: list[tuple[int, Tensor]] = []

    def set(self, numbers: NDArray[np.int32] | None, device: torch.device) -> None:
        """numbers: [T] of the next rows, until the next call; None: no row has one."""
        self.numbers, self._rows = None, []
        if numbers is None or not numbers.any():
            return
        self.numbers = torch.from_numpy(np.ascontiguousarray(numbers, np.int32))
        for number in np.unique(numbers[numbers > 0]).tolist():
            self._rows.append((number, torch.from_numpy(np.flatnonzero(numbers == number)).to(device)))

    def rows(self) -> Sequence[tuple[int, Tensor]]:
        """Each number that rows have, and int64 indices of these rows."""
        return self._rows

    def added(self, out: Tensor, x: Tensor, adapters: Mapping[int, Sequence[LowRankRows]]) -> Tensor:
        """out [T, outputs] of a linear layer, and what the rows' adapters add to it for x [T, inputs]. adapters: by
        number."""
        for number, rows in self._rows:
            for part in adapters.get(number, ()):
                inner = x[rows] @ part.down.to(x.dtype).T
                outputs = slice(part.first_row, part.first_row + len(part.up))
                out[rows, outputs] += inner @ part.up.to(x.dtype).T
        return out
