"""Number of cores available to a process, and low-priority threads."""

import math
import os
import sys
import threading
from pathlib import Path

_CGROUP_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))

_BACKGROUND_NICENESS = 10
"""A thread at this niceness gets a tenth of a core that it competes for."""


def lower_thread_priority() -> None:
    """Lower the calling thread's priority until it ends, so that others get the cores first. Linux only."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A process started by `nice` may already have lower priority, and raising it is not allowed.
    if os.getpriority(os.PRIO_PROCESS, thread) < _BACKGROUND_NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _BACKGROUND_NICENESS)


def available_cores() -> int:
    """Cores that this process may run on, limited by the CPU quota of its control group; at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(num_cores, cgroup_cores(*_CGROUP_QUOTAS))))


def cgroup_cores(quota_file: Path, old_quota_file: Path) -> float:
    """CPU quota of the control group in cores; infinite without a limit.

    Reads cgroup version 2 (quota and period in `quota_file`), else version 1 (two files)."""
    try:
        if quota_file.exists():
            quota, period = quota_file.read_text().split()
        else:
            quota = old_quota_file.read_text().strip()
            period = old_quota_file.with_name("cpu.cfs_period_us").read_text().strip()
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
