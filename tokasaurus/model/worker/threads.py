"""How many threads a worker computes with on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.monitoring.cores import available_cores

_SPARES_ONE_FROM = 4
"""With so many cores, one is left to server and manager: they would take it anyway, from a thread that the others then
wait for. On fewer, a whole core is more than they need."""


def set_worker_threads(num_workers: int) -> int:
    """Settles the threads of torch and of the kernels for one of num_workers that share this machine, and returns their
    number. OMP_NUM_THREADS overrules it."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(worker_threads(available_cores(), torch.get_num_threads(), num_workers))
    return torch.get_num_threads()


@contextmanager
def leave_threads_to(kernels: Kernels) -> Iterator[None]:
    """Inside, the kernels compute with as many threads as torch did, and torch with one: what it still does in their
    forwards is small, but an OpenMP region waits for each of its threads, even for one that sleeps or whose core
    another process has."""
    num_threads = torch.get_num_threads()
    kernels.set_num_threads(num_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def worker_threads(num_cores: int, most: int, num_workers: int) -> int:
    """Threads of each of num_workers on num_cores; most: that torch would take by itself, on a machine with
    hyper-threads one for each real core."""
    num_free = num_cores - 1 if num_cores >= _SPARES_ONE_FROM else num_cores
    return max(1, min(num_free, most) // num_workers)
