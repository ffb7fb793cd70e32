"""Compute how many KV blocks a worker gets, and show the arithmetic to the user."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tokasaurus.messages.status import UserError
from tokasaurus.monitoring.cores import ControlGroup, control_groups

CPU_FRACTION = 0.25
"""Fraction of the available memory for the KV cache on a CPU: the rest is left to the machine's other programs."""

CUDA_FRACTION = 0.95
"""Fraction of the device memory left after weights and the largest forward: the rest covers fragmentation."""

# Version of control groups -> names of the limit and usage files.
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_PAGE_CACHE = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of a worker's KV cache."""

    num_blocks: int
    """Usable blocks, without the padding block."""

    arithmetic: str
    """How num_blocks was computed; one line for the user."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The memory of one KV block: every worker of a replica has a part of it, as large as its layers and heads."""

    own: int
    """On this worker."""

    total: int
    """On all workers that share the available memory, together."""

    num_workers: int = 1
    """How many these are."""

    def describe(self) -> str:
        """`total`, for the user."""
        of_workers = "" if self.num_workers == 1 else f" of {self.num_workers} workers"
        return f"{show_size(self.total)} a block{of_workers}"


def plan_fixed(num_tokens: int, page_size: int, block: BlockBytes, available_bytes: int) -> KVCachePlan:
    """A KV cache of at least `num_tokens`, as the user asked, on each of the workers that share the available memory.

    Raises UserError if memory does not suffice.
    """
    num_blocks = -(-num_tokens // page_size)
    needed = (num_blocks + 1) * block.total  # with the padding block
    if needed > available_bytes:
        most = max(0, available_bytes // block.total - 1) * page_size
        on_workers = "" if block.num_workers == 1 else f" on {block.num_workers} workers together"
        raise UserError(
            f"kv_cache_num_tokens={num_tokens}: needs {show_size(needed)}{on_workers}, but only"
            f" {show_size(available_bytes)} are available, enough for at most {most}"
        )
    return KVCachePlan(
        num_blocks,
        f"{num_tokens:,} tokens asked / {page_size} a block = {num_blocks:,} blocks of {show_size(block.own)}"
        f" = {show_size(num_blocks * block.own)}",
    )


def plan_auto(
    available_bytes: int, what_is_available: str, fraction: float, page_size: int, block: BlockBytes
) -> KVCachePlan:
    """A KV cache in a fraction of the available memory, which all workers get as many blocks of. Raises UserError if no
    block fits."""
    budget = int(available_bytes * fraction)
    num_blocks = budget // block.total - 1  # minus the padding block
    if num_blocks < 1:
        raise UserError(
            f"{show_size(budget)} of memory is too little for a KV cache with {block.describe()};"
            " free some memory, or set kv_cache_num_tokens, or a lower max_tokens_per_forward"
        )
    return KVCachePlan(
        num_blocks,
        f"{show_size(available_bytes)} {what_is_available} x {fraction:g} / {block.describe()}"
        f" = {num_blocks:,} blocks of {page_size} = {num_blocks * page_size:,} tokens",
    )


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


def show_size(num_bytes: float) -> str:
    """With a unit and four digits, for the user."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
