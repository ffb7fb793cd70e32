"""Sums over tensor-parallel ranks through memory of each rank that the others can read: torch's symmetric memory.

NCCL's sum of a few kilobytes takes far longer than the bytes need. Where each rank reads what the others have written,
one kernel suffices. Which way is the fastest up to how many bytes is measured at start (worker/all_reduce_start.py).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from tokasaurus.model.buffer_sizes import SUM_ALIGNMENT, SUMMED_DTYPES

# T tokens in this forward, E hidden size


DTYPES = tuple(getattr(torch, name) for name in SUMMED_DTYPES)
"""Torch's kernels sum numbers of these dtypes."""

Way: TypeAlias = Callable[[Tensor], None]
"""Replaces a contiguous tensor of at most the buffer's size, in its dtype, by the sum over the ranks."""


def unreadable_device(device: torch.device, first_device: int, tp_size: int) -> int | None:
    """The index of a CUDA device of the ranks whose memory `device`, one of them, cannot read; None if there is none.

    first_device: index of the first rank's device; the others follow.
    """
    others = (other for other in range(first_device, first_device + tp_size) if other != device.index)
    return next((other for other in others if not torch.cuda.can_device_access_peer(device, other)), None)


class SharedBuffer(Protocol):
    """A buffer of each rank of a group that all of them can read, once each has joined."""

    def join(self) -> None:
        """Called by all ranks, which wait for each other. Raises if memory cannot be shared."""

    def ways(self) -> dict[str, Way]:
        """Ways to sum by a name for the user, once the ranks have joined."""


class SymmetricBuffer:
    """A SharedBuffer of torch's symmetric memory."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import

        self._group = group.group_name
        self._buffer = symmetric_memory.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._has_multicast = False

    def join(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._has_multicast = symmetric_memory.rendezvous(self._buffer, self._group).multicast_ptr != 0

    def ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {"one-shot": self._sum_in_one_shot}
        if self._has_multicast:
            ways["multimem"] = self._sum_in_switch
        return ways

    def _sum_in_one_shot(self, partial: Tensor) -> None:
        """Each rank reads the partial sums of all others."""
        own = self._own(partial)
        # In a launch of its own: torch's one_shot_all_reduce_copy_out tells the other ranks to read before all of its
        # threads have copied.
        own.copy_(partial)
        torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", self._group, partial)

    def _sum_in_switch(self, partial: Tensor) -> None:
        """NVLink's switch adds up: each rank has it sum its share of the numbers, and send these to all."""
        own = self._own(partial)
        own.copy_(partial)
        torch.ops.symm_mem.multimem_all_reduce_(own, "sum", self._group)
        partial.copy_(own)

    def _own(self, partial: Tensor) -> Tensor:
        return self._buffer[: partial.numel()].view(partial.shape)


class SymmetricAllReduce:
    """The sums of one group: by the fastest way for their size, which is the same on all ranks."""

    def __init__(
        self, ways: dict[str, Way], limits: Sequence[tuple[int, str]], dtype: torch.dtype, group: ProcessGroup
    ) -> None:
        """limits: the most bytes of a sum for each of some ways, ascending; larger ones are NCCL's."""
        self._limits = [(max_bytes, ways[name]) for max_bytes, name in limits]
        self._dtype = dtype
        self._group = group
        self.name = group.group_name
        """Name by which `sum_over_ranks` finds it."""
        _all_reduces[self.name] = self

    def sum(self, partial: Tensor) -> None:
        """Replace `partial`, contiguous, by the sum over the ranks. Its size alone decides how: a recording in a CUDA
        graph stays valid."""
        num_bytes = partial.numel() * partial.itemsize
        if partial.dtype == self._dtype and num_bytes % SUM_ALIGNMENT == 0:
            for max_bytes, way in self._limits:
                if num_bytes <= max_bytes:
                    way(partial)
                    return
        torch.distributed.all_reduce(partial, group=self._group)


_all_reduces: weakref.WeakValueDictionary[str, SymmetricAllReduce] = weakref.WeakValueDictionary()
"""All reduces by name: a compiled graph passes tensors, numbers and strings only."""


def _sum_over_ranks(partial: Tensor, name: str) -> None:
    """partial: [T, E]."""
    _all_reduces[name].sum(partial)


sum_over_ranks = torch.library.custom_op("tokasaurus::sum_over_ranks", _sum_over_ranks, mutates_args=("partial",))
"""`SymmetricAllReduce.sum` as one operation that a compiler leaves whole: how large a sum is shows when it runs."""


@sum_over_ranks.register_fake
def _compute_nothing(_partial: Tensor, _name: str) -> None:
    """A compiler learns what it needs from the declared argument: the call returns nothing."""
