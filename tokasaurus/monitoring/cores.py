"""Number of cores available to a process, low-priority threads, and control groups: with them, Linux limits the CPU
time and the memory of a container or service."""

import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BACKGROUND_NICENESS = 10
"""A thread at this niceness gets a tenth of a core that it competes for."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group that the process is in. Its limits apply to all processes of it and of the groups below it together."""

    version: int
    """1 or 2: the names of the files differ."""
    directory: Path

    def read(self, name: str) -> str | None:
        """A file's content; None if it cannot be read, as where the group has no such limit."""
        try:
            return (self.directory / name).read_text().strip()
        except OSError:
            return None


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """The groups whose limits of `controller` ("cpu", "memory") apply to this process: its own and those above it.

    root: the directory with /proc and /sys, where Linux describes control groups. Other systems have none.
    """
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        # Version 2 names no controller. Beside version 1 it lies in a directory of its own.
        if controllers == "":
            version, places = 2, [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            version, places = 1, [mounts / name for name in dict.fromkeys((controller, controllers))]
        else:
            continue
        # In a container, the path may be the host's, or lead out of the mount: then only the mount point exists.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for place in places:
            for depth in range(len(names) + 1):
                group = place.joinpath(*names[:depth])
                if group.is_dir():
                    yield ControlGroup(version, group)


def lower_thread_priority() -> None:
    """Lower the calling thread's priority until it ends, so that others get the cores first. Linux only."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A process started by `nice` may already have lower priority, and raising it is not allowed.
    if os.getpriority(os.PRIO_PROCESS, thread) < _BACKGROUND_NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _BACKGROUND_NICENESS)


def available_cores(quota_share: float = 1.0) -> int:
    """Cores that this process may run on, limited by its share of the CPU quotas of its control groups; at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(num_cores, quota_share * cgroup_cores())))


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
