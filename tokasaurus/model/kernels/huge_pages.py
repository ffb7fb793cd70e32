"""Memory in huge pages, for what is read from end to end in every step: with pages of 4 KiB, address translation alone
costs a tenth of the time."""

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 64


def allocate(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros, touched at first use; in huge pages where it spans whole ones and the system allows."""
    memory = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class HugePageTensors:
    """Tensors one behind the other, so that small ones share pages. Freed with the last of them."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to 64 bytes."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._rest):
            self._rest = allocate(max(num_bytes, _CHUNK_BYTES))
        memory = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(dtype).view(shape)
