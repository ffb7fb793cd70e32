"""How many threads a worker computes with on a CPU."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tokasaurus.model.kernels.library import Kernels

_CGROUP_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))

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
    kernels.library.toka_set_num_threads(num_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        kernels.library.toka_set_num_threads(0)


def worker_threads(num_cores: int, most: int, num_workers: int) -> int:
    """Threads of each of num_workers on num_cores; most: that torch would take by itself, on a machine with
    hyper-threads one for each real core."""
    num_free = num_cores - 1 if num_cores >= _SPARES_ONE_FROM else num_cores
    return max(1, min(num_free, most) // num_workers)


def available_cores() -> int:
    """Cores that this process may run on, and no more than its control group gives it time for."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(num_cores, cgroup_cores(*_CGROUP_QUOTAS))))


def cgroup_cores(quota_file: Path, old_quota_file: Path) -> float:
    """Cores' worth of time that the control group allows, in version 2 (both numbers in one file) or 1; infinite where
    it sets no limit."""
    try:
        if quota_file.exists():
            quota, period = quota_file.read_text().split()
        else:
            quota = old_quota_file.read_text().strip()
            period = old_quota_file.with_name("cpu.cfs_period_us").read_text().strip()
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
