"""How many cores a process has, and threads that leave them to others."""

import math
import os
import sys
import threading
from pathlib import Path

_CGROUP_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))

_BACKGROUND_NICENESS = 10
"""A thread with it gets a tenth of a core that others want as well."""


def lower_thread_priority() -> None:
    """The calling thread, until it ends, leaves the cores to others that want them, where the system can do that."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _BACKGROUND_NICENESS:  # else started by `nice`; raising is not allowed
        os.setpriority(os.PRIO_PROCESS, thread, _BACKGROUND_NICENESS)


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
