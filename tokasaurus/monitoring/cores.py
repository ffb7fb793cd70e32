"""Number of cores available to a process, and low-priority threads."""

import math
import os
import sys
import threading
from pathlib import Path

from tokasaurus.monitoring.control_groups import ControlGroup, control_groups

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
    """Cores that this process may run on, limited by the CPU quotas of its control groups; at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(num_cores, cgroup_cores())))


def cgroup_cores(root: Path = Path("/")) -> float:
    """The smallest CPU quota of the process's control groups, in cores; infinite without a quota.

    root: as of `control_groups`."""
    return min((_quota(group) for group in control_groups("cpu", root)), default=math.inf)


def _quota(group: ControlGroup) -> float:
    if group.version == 2:
        quota, _, period = (group.read("cpu.max") or "").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us") or "", group.read("cpu.cfs_period_us") or ""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no file
        return math.inf
    return cores if cores > 0 else math.inf  # -1: no quota
