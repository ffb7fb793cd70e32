"""How many replicas there are, and at which memory nodes of the machine each stays if it computes on a CPU.

A core reads the memory of another node more slowly than its own, and all weights are read for each step: so each node
gets a replica with weights of its own."""

from dataclasses import dataclass
from pathlib import Path

from tokasaurus.checkpoint import Checkpoint, weight_files
from tokasaurus.checkpoint.weight_files import read_tensors
from tokasaurus.config import ServerConfig
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.monitoring.available_memory import available_memory
from tokasaurus.monitoring.cores import cgroup_cores
from tokasaurus.monitoring.cuda_devices import CudaDevices
from tokasaurus.monitoring.memory_nodes import (
    MemoryNode,
    Place,
    has_memory_policy,
    memory_nodes,
    places,
    show_cores,
)
from tokasaurus.processes.feasible import computes_on_cpu
from tokasaurus.workers import num_replicas

_LEAST_CORES = 0.5
"""Requests are shared out as if replicas were equally fast: a node may have this share of the cores of the largest."""


@dataclass(frozen=True)
class ReplicaPlaces:
    """A place for each replica."""

    places: list[Place | None]
    """None: nothing is bound."""
    note: str = ""
    """For the user; empty where there are no several nodes."""


def place_replicas(
    config: ServerConfig, checkpoint: Checkpoint, found: CudaDevices | None, root: Path = Path("/")
) -> ReplicaPlaces:
    """dp_size replicas; auto is one for each memory node, if there are several and nothing speaks against it.

    found: as of check_devices. root: as of memory_nodes."""
    nodes = memory_nodes(root) if computes_on_cpu(config, found) else []
    if len(nodes) < 2:
        return ReplicaPlaces([None] * num_replicas(config))
    number, why = config.dp_size, ""
    if number is None:
        why = _why_one(config, checkpoint, nodes, root)
        number = 1 if why else len(nodes)
    found_places = places(nodes, number)
    if number == 1:
        because = f", since {why}; dp_size={len(nodes)} starts one on each" if why else ""
        return ReplicaPlaces(found_places, f"1 replica over {len(nodes)} memory nodes{because}")
    how = "one for each memory node" if number == len(nodes) else f"over {len(nodes)} memory nodes"
    cores = ", ".join(show_cores(place.cores) for place in found_places if place is not None)
    return ReplicaPlaces(found_places, f"{number} replicas, {how} (cores {cores})")


def _why_one(config: ServerConfig, checkpoint: Checkpoint, nodes: list[MemoryNode], root: Path) -> str:
    """Why there is not a replica on each node, for the user; empty if there should be."""
    if config.tp_size > 1 or config.pp_size > 1:
        return "tp_size= or pp_size= divides the model"
    if has_memory_policy():
        return "this process was started with a policy for its memory, as by numactl"
    numbers = [len(node.cores) for node in nodes]
    least, most = min(numbers), max(numbers)
    if least < _LEAST_CORES * most:
        return f"one has {least} of the cores that may be used, and another {most}"
    if (quota := cgroup_cores(root)) <= most:
        return f"the CPU quota of {quota:g} cores is no more than one has"
    limit = min(*(node.num_bytes for node in nodes), available_memory(root).num_bytes // len(nodes))
    return _why_no_room(config, checkpoint, limit)


def _why_no_room(config: ServerConfig, checkpoint: Checkpoint, limit: int) -> str:
    """As _why_one. limit: bytes that a replica may have, for weights, the largest forward, and a KV cache with as many
    tokens as the user says, else with one sequence of full length."""
    # They load NumPy, which the launcher does not need on other machines.
    from tokasaurus.checkpoint.dequantized import is_plain
    from tokasaurus.model.worker.memory_plan import (
        CPU_FRACTION,
        FORWARD,
        ROTARY,
        WEIGHTS,
        plan_worker,
        show_size,
        sizes_of,
    )

    dtype = config.dtype or "bfloat16"
    sizes = sizes_of(config, checkpoint.info, limit, dtype, config.kv_cache_dtype or dtype)
    plan = plan_worker(checkpoint.info, Mesh(), sizes)
    parts = {part.name: part.num_bytes for part in plan.parts}
    files = weight_files(checkpoint.directory)
    if not all(map(is_plain, read_tensors(files, checkpoint.info.quantization).values())):
        parts[WEIGHTS] = min(parts[WEIGHTS], sum(file.stat().st_size for file in files))
    num_tokens, share = config.kv_cache_num_tokens, 1.0
    if num_tokens is None:
        num_tokens, share = sizes.context_length, CPU_FRACTION
    fixed_bytes = parts[WEIGHTS] + parts[ROTARY] + parts[FORWARD]
    kv_bytes = num_tokens * plan.kv_bytes_per_token / share
    if fixed_bytes + kv_bytes <= limit:
        return ""
    return (
        f"a replica needs {show_size(fixed_bytes)}, and {show_size(kv_bytes)} with which its KV cache holds "
        f"{num_tokens:,} tokens, but has only {show_size(limit)}"
    )
