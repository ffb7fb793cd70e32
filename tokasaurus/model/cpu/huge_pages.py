"""Memory in huge pages, for data that every step reads from end to end.

With pages of 4 KiB, address translation alone takes a tenth of the time.
"""

import contextlib
import ctypes
import math
import mmap
import threading

import torch
from torch import Tensor

from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.monitoring.cores import lower_thread_priority

_HUGE_PAGE = 2 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 64


def allocate(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros; the system provides memory at first use, in huge pages where possible.

    Raises OSError if the system cannot reserve num_bytes.
    """
    memory = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def touch_in_background(memory: Tensor, kernels: Kernels, num_threads: int) -> list[threading.Thread]:
    """Touch all of `memory`, contiguous [A, B], so that the system provides it; returns the running threads.

    The order is the first 2 MiB of each of the A areas, then the next 2 MiB of each, and so on. The threads have low
    priority and end with the process. The memory may be used meanwhile: touching it does not change its contents.
    """
    touch = kernels.library.toka_touch
    touch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    num_taken = ctypes.c_int64(0)

    def run() -> None:
        lower_thread_priority()
        touch(memory.data_ptr(), len(memory), memory[0].nbytes, ctypes.byref(num_taken))

    threads = [threading.Thread(target=run, name="touch", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads


class HugePageTensors:
    """Allocates tensors in consecutive memory, so that small ones share huge pages.

    A chunk of memory is freed when all of its tensors are.
    """

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
