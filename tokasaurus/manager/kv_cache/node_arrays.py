"""What simulations and prefix groups need of each node of the prefix tree, as arrays indexed by node."""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_SIZE = 1024
"""The arrays do not shrink below this size."""


class NodeArrays:
    """Gives each node an index. Index 0 is the root's, its own parent.

    The arrays are replaced when they grow or shrink, and entries at unused indices are meaningless. A new node takes
    the lowest free index, so once most nodes are gone, the last ones in the upper half give way to others in the lower
    half sooner or later, and the upper half is given up.
    """

    def __init__(self, root_sequences: int) -> None:
        """root_sequences: the root's reference count."""
        self.parents = np.zeros(1, np.int32)
        """Index of each node's parent."""
        self.end_blocks = np.zeros(1, np.int32)
        """Blocks from the root to the end of each node."""
        self.num_sequences = np.full(1, root_sequences, np.int32)
        """Each node's reference count."""
        self._is_used = np.ones(1, np.bool_)
        self._num_nodes = 1
        self._num_in_upper_half = 0
        """Nodes whose index is in the upper half of the arrays."""
        self._free: list[int] = []
        """A heap of free indices. Those beyond the arrays stay in it when they shrink."""

    def add(self, parent: int, end_block: int, num_sequences: int) -> int:
        """Return the index of a new node. parent: its parent's index."""
        size = len(self.parents)
        if not self._free or self._free[0] >= size:
            self._free = list(range(size, 2 * size))
            size *= 2
            self._resize(size)
        index = heapq.heappop(self._free)
        self._num_nodes += 1
        self._num_in_upper_half += 2 * index >= size
        self._is_used[index] = True
        self.parents[index] = parent
        self.end_blocks[index] = end_block
        self.num_sequences[index] = num_sequences
        return index

    def remove(self, index: int) -> None:
        """Free the index of a node that is no longer in the tree."""
        size = len(self.parents)
        heapq.heappush(self._free, index)
        self._is_used[index] = False
        self._num_nodes -= 1
        self._num_in_upper_half -= 2 * index >= size
        while not self._num_in_upper_half and size > max(LEAST_SIZE, 4 * self._num_nodes):
            size //= 2
            self._resize(size)

    def _resize(self, size: int) -> None:
        self.parents = _resized(self.parents, size)
        self.end_blocks = _resized(self.end_blocks, size)
        self.num_sequences = _resized(self.num_sequences, size)
        self._is_used = _resized(self._is_used, size)
        self._num_in_upper_half = int(self._is_used[size // 2 :].sum())


def _resized(array: NDArray[Any], size: int) -> NDArray[Any]:
    resized = np.zeros(size, array.dtype)
    resized[: len(array)] = array[:size]
    return resized
