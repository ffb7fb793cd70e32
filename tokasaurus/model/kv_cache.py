"""How many KV blocks a worker gets, and the arithmetic behind the number."""

from dataclasses import dataclass
from pathlib import Path

from tokasaurus.messages.lifecycle import UserError

CPU_FRACTION = 0.25
"""Share of the memory available to the process that the KV cache takes on a CPU: the machine has other uses."""

CUDA_FRACTION = 0.95
"""Share of the device memory left beside weights and the largest forward: the rest covers fragmentation."""

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """num_blocks: usable ones, the padding block not counted. arithmetic: how it was found, one line for the user."""

    num_blocks: int
    arithmetic: str


def plan_fixed(num_tokens: int, page_size: int, bytes_per_block: int) -> KVCachePlan:
    """A KV cache of at least `num_tokens`, as the user asked."""
    num_blocks = -(-num_tokens // page_size)
    return KVCachePlan(
        num_blocks,
        f"{num_tokens:,} tokens asked / {page_size} a block = {num_blocks:,} blocks of {_size(bytes_per_block)}"
        f" = {_size(num_blocks * bytes_per_block)}",
    )


def plan_auto(
    available_bytes: int,
    what_is_available: str,
    fraction: float,
    num_replicas: int,
    page_size: int,
    bytes_per_block: int,
) -> KVCachePlan:
    """A share of the memory that is there. Raises UserError if that is not one block."""
    budget = int(available_bytes * fraction / num_replicas)
    num_blocks = budget // bytes_per_block - 1  # the padding block is paid for as well
    if num_blocks < 1:
        raise UserError(
            f"{_size(budget)} of memory is too little for a KV cache with blocks of {_size(bytes_per_block)};"
            " free some memory, or set kv_cache_num_tokens"
        )
    share = "" if num_replicas == 1 else f" / {num_replicas} replicas"
    return KVCachePlan(
        num_blocks,
        f"{_size(available_bytes)} {what_is_available} x {fraction:g}{share} / {_size(bytes_per_block)} a block"
        f" = {num_blocks:,} blocks of {page_size} = {num_blocks * page_size:,} tokens",
    )


def available_cpu_bytes() -> int:
    """Memory that this process can still get: the machine's, or what the control group leaves if that is less."""
    available = _meminfo_available()
    for limit_file, usage_file in _CGROUP_LIMITS:
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; set kv_cache_num_tokens")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
