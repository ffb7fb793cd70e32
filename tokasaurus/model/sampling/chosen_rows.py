"""Some of the rows that sample: their indices are on the host, which plans with them, and on the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.staging.staging import Staging

# R rows that sample, A of them are chosen


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """A of the R rows that sample."""

    on_host: NDArray[np.int64]
    """int64 [A], indices into R, ascending."""

    on_device: Tensor
    """int64 [A], the same."""

    def within(self, first_row: int, num_rows: int) -> slice:
        """Which of the A are among the rows from `first_row` on: found without waiting for the device."""
        return slice(*np.searchsorted(self.on_host, (first_row, first_row + num_rows)).tolist())

    def cut(self, first_row: int, num_rows: int) -> "ChosenRows":
        """Those among the rows from `first_row` on, as indices into these."""
        own = self.within(first_row, num_rows)
        return ChosenRows(self.on_host[own] - first_row, self.on_device[own] - first_row)

    def index_of_row(self, num_rows: int) -> Tensor:
        """Each row's index among the chosen ones, or -1: int32 [R = num_rows], on the device."""
        rows = self.on_device
        indices = torch.full((num_rows,), -1, dtype=torch.int32, device=rows.device)
        return indices.index_copy_(0, rows, torch.arange(len(rows), dtype=torch.int32, device=rows.device))


def choose_rows(rows: NDArray[np.integer[Any]], staging: Staging) -> ChosenRows:
    """rows: [A], ascending. They are on the device once `staging` has sent them."""
    indices = rows.astype(np.int64)
    return ChosenRows(indices, staging.to_device(indices))
