"""Choose how many KV blocks a worker gets, by what the user asked for or by the memory that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.worker.forward_memory import ForwardMemory
from tokasaurus.model.worker.kv_memory import (
    CPU_FRACTION,
    CUDA_FRACTION,
    BlockBytes,
    KVCachePlan,
    available_cpu_bytes,
    plan_auto,
    plan_fixed,
)
from tokasaurus.model.worker.memory_plan import FORWARD, GRAPHS
from tokasaurus.model.worker.memory_report import MemoryReport
from tokasaurus.model.worker.sibling_memory import available_to_all, own_bytes, sibling_bytes

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


def size_kv_cache(
    config: ServerConfig,
    num_layers: int,
    shape: KVShape,
    backend: AttentionBackend,
    forward_memory: ForwardMemory | None,
    run_largest: Callable[[], object],
    measure_graphs: Callable[[], int],
    memory: MemoryReport,
) -> KVCachePlan:
    """The size that kv_cache_num_tokens sets, else a fraction of the device's free memory. num_layers: of all stages.
    forward_memory: None if unknown. run_largest: runs the largest forward. measure_graphs: records some graphs, and
    returns the bytes that all will take; both are called with a KV cache of the padding block alone, on CUDA.

    Raises UserError if memory does not suffice.
    """
    on_cpu = shape.device.type == "cpu"
    num_workers = config.dp_size * config.pp_size * config.tp_size
    forward_bytes = 0 if forward_memory is None else forward_memory.total
    own = shape.bytes_per_block
    block = BlockBytes(own, own)
    if on_cpu:
        block = BlockBytes(own, own // shape.num_layers * num_layers * config.dp_size * config.tp_size, num_workers)
    if on_cpu:
        available = available_cpu_bytes()
        if num_workers > 1:
            available = available_to_all(available, own_bytes(), sibling_bytes(), num_workers)
        available = max(0, available - num_workers * forward_bytes)
        what = (
            "available after weights and the largest forward" if forward_memory is not None else "of memory available"
        )
        fraction = CPU_FRACTION
    else:
        available = _free_cuda_bytes(shape.device, backend, run_largest, measure_graphs, memory)
        what, fraction = "free after weights, the largest forward and graphs", CUDA_FRACTION
    if config.kv_cache_num_tokens is not None:
        return plan_fixed(config.kv_cache_num_tokens, config.page_size, block, available)
    return plan_auto(available, what, fraction, config.page_size, block)


def _free_cuda_bytes(
    device: torch.device,
    backend: AttentionBackend,
    run_largest: Callable[[], object],
    measure_graphs: Callable[[], int],
    memory: MemoryReport,
) -> int:
    """What the largest forward and the graphs leave free, at least 0. They run with only the padding block as cache."""
    backend.allocate(1)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest()
    activations = torch.cuda.max_memory_allocated(device) - before
    memory.note(activations, FORWARD)
    torch.cuda.empty_cache()
    graphs = measure_graphs()
    memory.note(graphs, GRAPHS)
    return max(0, torch.cuda.mem_get_info(device)[0] - activations - graphs)
