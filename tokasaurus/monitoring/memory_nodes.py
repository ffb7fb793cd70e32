"""Memory nodes (NUMA): which memory of the machine is near which cores, and processes that stay at some. Linux only.

The system takes memory from the node of the core that first writes to it, as long as that node has some left."""

import ctypes
import logging
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

logger = logging.getLogger(__name__)

_MPOL_PREFERRED = 1
"""From linux/mempolicy.h: memory of one node, and of others when that has none left."""
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Machine -> numbers of set_mempolicy and get_mempolicy, for which the C library has no functions."""


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """A part of the machine's memory, and the cores that are nearest to it."""

    number: int
    cores: frozenset[int]
    """The ones that this process may run on; at least one."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """The memory nodes that a replica stays at, of several that there are."""

    nodes: tuple[MemoryNode, ...]
    num_sharing: int = 1
    """Replicas that stay there, this one included."""

    @property
    def cores(self) -> frozenset[int]:
        return frozenset[int]().union(*(node.cores for node in self.nodes))

    @property
    def num_bytes(self) -> int:
        """One replica's share of the memory."""
        return sum(node.num_bytes for node in self.nodes) // self.num_sharing


def memory_nodes(root: Path = Path("/")) -> list[MemoryNode]:
    """The nodes of which this process may use memory and cores, by number; none if the system does not tell.

    Cores without such memory count to the nearest node that has some. root: the directory with /proc and /sys."""
    try:
        status = (root / "proc/self/status").read_text()
        directories = {int(path.name[4:]): path for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
        allowed = _listed(_value(status, "Cpus_allowed_list"))
        cores = {number: allowed & _listed((path / "cpulist").read_text()) for number, path in directories.items()}
        nodes: dict[int, MemoryNode] = {}
        for number in sorted(_listed(_value(status, "Mems_allowed_list")) & directories.keys()):
            num_kib = int(_value((directories[number] / "meminfo").read_text(), rf"Node {number} MemTotal").split()[0])
            if num_kib and cores[number]:
                nodes[number] = MemoryNode(number, cores[number], num_kib << 10)
        for number in sorted(directories.keys() - nodes.keys()) if nodes else ():
            listed = (directories[number] / "distance").read_text().split()
            distances = dict(zip(sorted(directories), map(int, listed), strict=True))
            nearest = min(nodes.values(), key=lambda node: (distances[node.number], len(node.cores)))
            nodes[nearest.number] = replace(nearest, cores=nearest.cores | cores[number])
    except (OSError, ValueError, IndexError):  # another system, or a container that hides them
        return []
    return list(nodes.values())


def _value(text: str, name: str) -> str:
    """What is behind `name:`. Raises ValueError."""
    found = re.search(rf"^{name}:(.*)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return found[1].strip()


def _listed(text: str) -> frozenset[int]:
    """The numbers of a list such as 0-3,8."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


def show_cores(cores: frozenset[int]) -> str:
    """Ranges of cores for the user, such as 0-3+8."""
    ordered = sorted(cores)
    firsts = [core for core in ordered if core - 1 not in cores]
    lasts = [core for core in ordered if core + 1 not in cores]
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def places(nodes: Sequence[MemoryNode], num_replicas: int) -> list[Place | None]:
    """Each replica's place: the nodes in turn, or neighbouring ones together if there are fewer replicas. None for a
    single replica, and without several nodes: then nothing is bound."""
    if num_replicas == 1 or len(nodes) < 2:
        return [None] * num_replicas
    if num_replicas < len(nodes):
        ends = [index * len(nodes) // num_replicas for index in range(num_replicas + 1)]
        return [Place(tuple(nodes[begin:end])) for begin, end in pairwise(ends)]
    turns = [range(index, num_replicas, len(nodes)) for index in range(len(nodes))]
    return [
        Place((nodes[index % len(nodes)],), num_sharing=len(turns[index % len(nodes)])) for index in range(num_replicas)
    ]


@contextmanager
def bound_to(place: Place | None) -> Iterator[None]:
    """Inside, the calling thread runs on the place's cores alone, and prefers its memory; so do processes that it
    starts, with all their threads from the first one on. None, or a system that forbids it, changes nothing."""
    if place is None:
        yield
        return
    before = os.sched_getaffinity(0)
    is_policy_ours = len(place.nodes) == 1 and not has_memory_policy()
    try:
        os.sched_setaffinity(0, place.cores)
    except OSError as error:
        logger.debug("not bound to cores %s: %s", show_cores(place.cores), error.strerror)
    if is_policy_ours:
        _prefer(place.nodes[0].number)
    try:
        yield
    finally:
        with suppress(OSError):  # the container's cores have changed
            os.sched_setaffinity(0, before)
        if is_policy_ours:
            _prefer(None)


def has_memory_policy() -> bool:
    """Whether the calling thread has a policy for its memory, as numactl sets one."""
    mode = ctypes.c_int()
    return _system_call(1, ctypes.byref(mode), None, 0, None, 0) and mode.value != 0


def _prefer(node: int | None) -> None:
    """None: the system's own policy again."""
    if node is None:
        _system_call(0, 0, None, 0)
        return
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    _system_call(0, _MPOL_PREFERRED, mask, 64 * len(mask) + 1)  # the kernel counts one bit less


def _system_call(which: int, *arguments: object) -> bool:
    """Make one of _SYSTEM_CALLS; whether it was allowed, which it often is not in a container."""
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    is_done = library.syscall(numbers[which], *arguments) == 0
    if not is_done:
        logger.debug("no memory policy: %s", os.strerror(ctypes.get_errno()))
    return bool(is_done)
