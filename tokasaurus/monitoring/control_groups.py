"""The control groups of this process: with them, Linux limits the CPU time and the memory of a container or service."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
