"""Memory that a process can still allocate: of the machine, and of the control groups that it is in."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from tokasaurus.monitoring.cores import ControlGroup, control_groups

# Version of control groups -> names of the limit and usage files.
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_PAGE_CACHE = ("active_file", "inactive_file")


def available_cpu_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate: the machine's available memory or, if less, what its control groups
    allow.

    root: as of `control_groups`.
    """
    machine: int = psutil.virtual_memory().available
    return max(0, min([machine, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Bytes left under each memory limit of the process's control group and of the groups above it."""
    for group in control_groups("memory", root):
        limit, usage = (group.read(name) for name in _MEMORY_FILES[group.version])
        if limit not in (None, "max") and usage is not None:
            yield int(limit) - int(usage) + _page_cache(group)


def _page_cache(group: ControlGroup) -> int:
    """Bytes of cached files, such as the checkpoint: they count as used, but the system drops them on demand."""
    lines = (group.read("memory.stat") or "").splitlines()
    sizes = {name: int(size) for name, size in map(str.split, lines)}
    # Version 1 lists a group's own bytes and, as "total_", the sum with its subgroups, to which the limit applies.
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in _PAGE_CACHE)
