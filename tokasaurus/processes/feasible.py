"""What a start's flags ask of this machine and of the model, checked before weights are fetched and processes started.

Only what is certain is refused here, from sizes that the parts of a start cannot fall below: workers measure what
really fits. Loads no torch."""

import logging

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, longest_context
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.monitoring.available_memory import AvailableMemory, available_memory
from tokasaurus.monitoring.cuda_devices import CudaDevices
from tokasaurus.workers import num_replicas, num_workers

logger = logging.getLogger(__name__)

WORKER_BYTES = 128 << 20
"""The least memory of a worker on a CPU that no other process shares: torch and Python, before the model."""

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, None: 2}


def check_devices(config: ServerConfig, found: CudaDevices | None) -> None:
    """found: None if it is not known. Raises FlagRefused if the flags need devices that are not there."""
    if config.device == "cpu" or found is None:
        return
    if found.count == 0:
        why = (
            ""
            if not found.num_unused
            else f": it is a build for CPUs, and {_devices(found.num_unused)} would stay unused"
        )
        if config.device == "cuda":
            raise FlagRefused(f"device=cuda: torch sees no CUDA device on this machine{why}; device=cpu needs none")
        if why:
            logger.warning("torch sees no CUDA device%s; TORCH=cuda of make serve installs the other build", why)
        return
    num_wanted = num_workers(config)
    if num_wanted > found.count:
        there = "there is 1" if found.count == 1 else f"there are {found.count}"
        raise FlagRefused(
            f"{_sizes_above_one(config)}: needs {num_wanted} CUDA devices, one for each model worker, and {there}; "
            f"their product may be at most {found.count}, or device=cpu"
        )


def computes_on_cpu(config: ServerConfig, found: CudaDevices | None) -> bool:
    """found: as of check_devices."""
    return config.device == "cpu" or (found is not None and found.count == 0)


def check_model(config: ServerConfig, info: ModelInfo, found: CudaDevices | None) -> None:
    """Raises FlagRefused if the model cannot be divided as the flags say, or if what they ask for exceeds the memory.

    found: as of check_devices."""
    mesh = Mesh(pp_size=config.pp_size, tp_size=config.tp_size, whole_experts=config.ep)
    try:
        mesh.check(info)
    except ValueError as error:
        raise FlagRefused(f"{error}{_sizes_that_fit(info, config.ep)}") from None
    is_on_cpu = computes_on_cpu(config, found)
    if is_on_cpu:
        # All workers share the memory.
        memory = available_memory()
        limit, of = memory.num_bytes, f"of memory are available (limit: {memory.limited_by})"
        workers = num_workers(config)
        _check_number(config, workers, memory)
    elif found is not None:
        limit, of, workers = found.largest_bytes, "are on the largest device", 1
    else:
        return
    for flag, wanted, num_bytes in _least_bytes(config, info):
        needed = wanted * num_bytes * (workers if is_on_cpu else 1)
        if needed > limit:
            most = int(limit / needed * wanted)
            together = f" on {workers} workers together" if workers > 1 else ""
            fits = f"only {_gib(limit)} {of}, enough for at most {most}"
            raise FlagRefused(f"{flag}={wanted}: needs {_gib(needed)}{together}, but {fits}")


def _check_number(config: ServerConfig, num_workers: int, memory: AvailableMemory) -> None:
    """Raises FlagRefused if so many workers on CPUs would take more than this without any model."""
    most = max(1, memory.num_bytes // WORKER_BYTES)
    if num_workers > most:
        raise FlagRefused(
            f"{_sizes_above_one(config)}: {num_workers} model workers need {_gib(num_workers * WORKER_BYTES)} besides "
            f"the model, but only {_gib(memory.num_bytes)} of memory are available (limit: {memory.limited_by}); "
            f"their product may be at most {most}"
        )


def _sizes_above_one(config: ServerConfig) -> str:
    sizes = {"dp_size": num_replicas(config), "pp_size": config.pp_size, "tp_size": config.tp_size}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _least_bytes(config: ServerConfig, info: ModelInfo) -> list[tuple[str, int, float]]:
    """Flag, its value, and the fewest bytes that each unit of it takes in one worker."""
    item = _ITEM_BYTES[config.kv_cache_dtype or config.dtype]
    kv_heads = max(info.num_kv_heads, config.tp_size) / config.tp_size
    kv_bytes = 2 * len(info.spec.attentions) / config.pp_size * kv_heads * info.head_dim * item
    longest = longest_context(info.context_length, config.max_num_tokens_per_request)
    row = info.hidden_size * _ITEM_BYTES[config.dtype]  # a hidden state; a forward has several
    table = 4 * -(-longest // config.page_size)  # a slot's table of blocks
    return [
        *([("kv_cache_num_tokens", config.kv_cache_num_tokens, kv_bytes)] if config.kv_cache_num_tokens else []),
        ("max_seqs_per_forward", config.max_seqs_per_forward, table),
        ("max_tokens_per_forward", config.max_tokens_per_forward, row),
    ]


def _sizes_that_fit(info: ModelInfo, ep: bool) -> str:
    """Each tp_size by which the model can be divided, for the end of a message."""
    fitting = []
    for size in range(1, info.num_heads + 1):
        try:
            Mesh(tp_size=size, whole_experts=ep).check(info)
        except ValueError:
            continue
        fitting.append(size)
    listed = ", ".join(map(str, fitting))
    return f"; tp_size may be {listed}, and pp_size at most {info.num_layers}" if fitting else ""


def _devices(count: int) -> str:
    return "1 NVIDIA device" if count == 1 else f"{count} NVIDIA devices"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):,.1f} GiB"
