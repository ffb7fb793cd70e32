"""What a start's flags ask of this machine and of the model, checked before weights are fetched and processes started.

Only what is certain is refused here, from sizes that the parts of a start cannot fall below: workers measure what
really fits. Loads no torch."""

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, longest_context
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.monitoring.available_memory import AvailableMemory, available_memory

WORKER_BYTES = 128 << 20
"""The least memory of a worker on a CPU that no other process shares: torch and Python, before the model."""

_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, None: 2}


@dataclass(frozen=True, slots=True)
class CudaDevices:
    """The CUDA devices that torch will see."""

    count: int
    largest_bytes: int
    """Memory of the one that has most."""


def check_devices(config: ServerConfig, found: CudaDevices | None) -> None:
    """found: None if it is not known. Raises FlagRefused if the flags need devices that are not there."""
    if config.device == "cpu" or found is None:
        return
    if found.count == 0:
        if config.device == "cuda":
            raise FlagRefused("device=cuda: torch sees no CUDA device on this machine; device=cpu needs none")
        return
    num_workers = config.dp_size * config.pp_size * config.tp_size
    if num_workers > found.count:
        there = "there is 1" if found.count == 1 else f"there are {found.count}"
        raise FlagRefused(
            f"{_sizes_above_one(config)}: needs {num_workers} CUDA devices, one for each model worker, and {there}; "
            f"their product may be at most {found.count}, or device=cpu"
        )


def check_model(config: ServerConfig, info: ModelInfo, found: CudaDevices | None) -> None:
    """Raises FlagRefused if the model cannot be divided as the flags say, or if what they ask for exceeds the memory.

    found: as of check_devices."""
    mesh = Mesh(pp_size=config.pp_size, tp_size=config.tp_size)
    try:
        mesh.check(info)
    except ValueError as error:
        raise FlagRefused(f"{error}{_sizes_that_fit(info)}") from None
    is_on_cpu = config.device == "cpu" or (found is not None and found.count == 0)
    if is_on_cpu:
        # All workers share the memory.
        memory = available_memory()
        limit, of = memory.num_bytes, f"of memory are available (limit: {memory.limited_by})"
        workers = config.dp_size * config.pp_size * config.tp_size
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
    sizes = {name: getattr(config, name) for name in ("dp_size", "pp_size", "tp_size")}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _least_bytes(config: ServerConfig, info: ModelInfo) -> list[tuple[str, int, float]]:
    """Flag, its value, and the fewest bytes that each unit of it takes in one worker."""
    item = _FLOAT_BYTES[config.kv_cache_dtype or config.dtype]
    kv_heads = max(info.num_kv_heads, config.tp_size) / config.tp_size
    kv_bytes = 2 * info.num_layers / config.pp_size * kv_heads * info.head_dim * item
    longest = longest_context(info.context_length, config.max_num_tokens_per_request)
    row = info.hidden_size * _FLOAT_BYTES[config.dtype]  # a hidden state; a forward has several
    table = 4 * -(-longest // config.page_size)  # a slot's table of blocks
    return [
        *([("kv_cache_num_tokens", config.kv_cache_num_tokens, kv_bytes)] if config.kv_cache_num_tokens else []),
        ("max_seqs_per_forward", config.max_seqs_per_forward, table),
        ("max_tokens_per_forward", config.max_tokens_per_forward, row),
    ]


def _sizes_that_fit(info: ModelInfo) -> str:
    """Each tp_size by which the model can be divided, for the end of a message."""
    fitting = []
    for size in range(1, info.num_heads + 1):
        try:
            Mesh(tp_size=size).check(info)
        except ValueError:
            continue
        fitting.append(size)
    listed = ", ".join(map(str, fitting))
    return f"; tp_size may be {listed}, and pp_size at most {info.num_layers}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def cuda_devices() -> CudaDevices | None:
    """None if it is not known: torch is not built for NVIDIA's devices, or their library is not found where it is."""
    built = _torch_build()
    if built.cuda is None:
        return CudaDevices(0, 0) if built.hip is None else None
    memory_bytes = _memory_of_devices()
    if memory_bytes is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(memory_bytes) if visible is None else _num_visible(visible, len(memory_bytes))
    return CudaDevices(count, max(memory_bytes, default=0))


def _num_visible(listed: str, num_devices: int) -> int:
    """Entries of CUDA_VISIBLE_DEVICES before the first that names no device; one that is no number is believed."""
    count = 0
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        if re.fullmatch(r"[+-]?\d+", entry) and not 0 <= int(entry) < num_devices:
            break
        count += 1
    return count


def _torch_build() -> SimpleNamespace:
    """`cuda` and `hip` of torch/version.py: versions, or None. Importing torch takes seconds."""
    versions = SimpleNamespace(cuda=None, hip=None)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return versions
    text = (Path(spec.origin).parent / "version.py").read_text()
    for name in ("cuda", "hip"):
        found = re.search(rf"^{name}\b[^=\n]*= *'([^'\n]+)'", text, flags=re.MULTILINE)
        setattr(versions, name, None if found is None else found[1])
    return versions


class _Memory(ctypes.Structure):
    """nvmlMemory_t of NVIDIA's management library."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _memory_of_devices() -> list[int] | None:
    """Bytes of each NVIDIA device; None if the driver's library is absent or fails."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    sizes = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        sizes.append(int(memory.total))
    nvml.nvmlShutdown()
    return sizes
