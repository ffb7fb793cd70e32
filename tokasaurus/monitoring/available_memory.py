"""Memory that a process can still allocate: of the machine, and of the control groups that it is in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tokasaurus.monitoring.cores import ControlGroup, control_groups

# Version of control groups -> names of the limit and usage files.
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_PAGE_CACHE = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What a process can still allocate."""

    num_bytes: int
    limited_by: str
    """The limit and where it was read, for messages: the file of a control group, or the machine."""


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The machine's available memory or, if less, what the process's control groups allow.

    root: as of `control_groups`.
    """
    memory = psutil.virtual_memory()
    found = [(memory.available, f"the machine's {memory.total / (1 << 30):,.1f} GiB"), *_cgroup_headrooms(root)]
    num_bytes, limited_by = min(found)
    return AvailableMemory(max(0, num_bytes), limited_by)


def _cgroup_headrooms(root: Path) -> Iterator[tuple[int, str]]:
    """Bytes left under each memory limit of the process's control group and of the groups above it, and the limit with
    its file."""
    for group in control_groups("memory", root):
        names = _MEMORY_FILES[group.version]
        limit, usage = (group.read(name) for name in names)
        if limit is not None and limit != "max" and usage is not None:
            source = f"{group.directory / names[0]}, {int(limit) / (1 << 30):,.1f} GiB"
            yield int(limit) - int(usage) + _page_cache(group), source


def _page_cache(group: ControlGroup) -> int:
    """Bytes of cached files, such as the checkpoint: they count as used, but the system drops them on demand."""
    lines = (group.read("memory.stat") or "").splitlines()
    sizes = {name: int(size) for name, size in map(str.split, lines)}
    # Version 1 lists a group's own bytes and, as "total_", the sum with its subgroups, to which the limit applies.
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in _PAGE_CACHE)
