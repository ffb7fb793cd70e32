"""Set how many threads a worker computes with on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.monitoring.cores import available_cores

_SPARES_ONE_FROM = 4
"""From this many cores on, one core is left to server and manager: otherwise they would take time from one of the
compute threads, for which the others then wait. With fewer cores, a whole core is more than they need."""


def set_worker_threads(num_workers: int) -> int:
    """Set the number of torch's threads for one of num_workers on this machine, and return it.

    OMP_NUM_THREADS overrides it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(worker_threads(available_cores(), torch.get_num_threads(), num_workers))
    return torch.get_num_threads()


@contextmanager
def leave_threads_to(kernels: Kernels) -> Iterator[None]:
    """Inside, the kernels use as many threads as torch did, and torch uses one.

    Torch's remaining work in such forwards is small, but an OpenMP region waits for every thread, even for one that
    sleeps or whose core runs another process.
    """
    num_threads = torch.get_num_threads()
    kernels.set_num_threads(num_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def worker_threads(num_cores: int, most: int, num_workers: int) -> int:
    """Threads of each of num_workers on num_cores.

    most: torch's default number of threads; with hyper-threading, one per physical core.
    """
    num_free = num_cores - 1 if num_cores >= _SPARES_ONE_FROM else num_cores
    return max(1, min(num_free, most) // num_workers)
