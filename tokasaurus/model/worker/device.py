"""What a worker computes on: its device, its dtypes, its threads on a CPU, and a stopwatch for calls on the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.messages.status import FlagRefused, first_line
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.cpu.build import LibraryUnavailable, machine_sets
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.executors import has_fused_layers
from tokasaurus.model.triton_choice import uses_triton
from tokasaurus.model.worker.memory import MemoryTable, dtype_name
from tokasaurus.monitoring.cores import available_cores
from tokasaurus.monitoring.cuda_devices import cuda_devices, describe_driver
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.workers import num_replicas

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig
    from tokasaurus.model.worker.start import Start

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}

_SPARES_ONE_FROM = 4
"""From this many cores on, one core is left to server and manager: otherwise they would take time from one of the
compute threads, for which the others then wait. With fewer cores, a whole core is more than they need."""

_NUM_FILLING_GEMMS = 16
_FILLING_SIZE = 4096
"""Gemms of 4,096 cubed keep the fastest GPUs busy for 0.2 ms each, and the launch of one takes about 0.01 ms."""


def choose_platform(start: Start) -> str:
    """In which formats the device computes, and by which code; plans the memory. Raises FlagRefused."""
    config, device = start.config, start.device
    for name in ("cpu_isa", "quantization", "quantized_compute"):
        value = getattr(config, name)
        if device.type != "cpu" and value is not None:
            raise FlagRefused(f"{name}={value}: only device=cpu allows it, not device={device.type}")
    if device.type != "cpu" and config.kv_cache_dtype == "int8":
        raise FlagRefused(f"kv_cache_dtype=int8: only device=cpu allows it, not device={device.type}")
    if config.async_tp_threshold is not None and not start.info.is_native:
        raise FlagRefused("async_tp_threshold: there is none for a model that transformers' class computes")
    if config.async_tp_threshold is not None:
        from tokasaurus.model.parallel.async_tp import enable_fused_gemms  # slow to import

        enable_fused_gemms(config.async_tp_threshold, start.mesh, device, start.first_device)
    kernels = start.kernels = load_kernels(config.cpu_isa) if device.type == "cpu" else None
    compiles = config.torch_compile is True  # a class alone, which may be compiled for minutes, if it can be at all
    if start.info.is_native:
        compiles = is_compiled(config.torch_compile, device, start.info.spec.layers)
    start.compiler = Compiler(is_required=config.torch_compile is True) if compiles else None
    start.dtype = choose_dtype(config.dtype, device, kernels, compiles)
    start.activation_dtype = choose_activation_dtype(start.dtype, kernels, compiles)
    start.kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, start.dtype, start.activation_dtype)
    dtypes = start.dtype, start.kv_cache_dtype, start.activation_dtype
    start.memory = MemoryTable(config, start.info, start.mesh, device, *dtypes)
    described = f"{device}, {_describe_dtypes(start.dtype, start.activation_dtype, start.kv_cache_dtype)}"
    if device.type != "cpu":
        return described
    num_threads = set_worker_threads(config, start.place)
    if kernels is not None:
        kernels.set_num_threads(num_threads)
    return f"{described}, {num_threads} threads"


def _describe_dtypes(*dtypes: torch.dtype) -> str:
    """dtypes: of weights, activations and KV cache -> text for the user."""
    weights, activations, kv_cache = map(dtype_name, dtypes)
    if weights == activations == kv_cache:
        return weights
    return f"{weights} weights, {activations} activations, {kv_cache} KV cache"


def choose_device(name: str | None, index: int) -> torch.device:
    """The device of a worker. A CUDA device becomes the calling thread's current one.

    name: "cpu", "cuda", or None: CUDA if available, else CPU.
    index: among the workers of all replicas. Each has a CUDA device of its own; all share a CPU.
    Raises FlagRefused if CUDA is asked for and missing, has too few devices, or fails: then no CPU takes its place
    that nobody asked for.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and (found := cuda_devices()) is not None and found.count:
            raise FlagRefused(f"{_why_torch_sees_none(found.count)}; device=cpu serves on the CPU")
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise FlagRefused("device=cuda: torch sees no CUDA device on this machine")
    num_devices = torch.cuda.device_count()
    if index >= num_devices:
        raise FlagRefused(f"device=cuda: worker {index + 1} has no device of its own; torch sees only {num_devices}")
    device = torch.device(name, index)
    torch.cuda.set_device(device)  # else tensors and streams that name no index would be made on cuda:0
    return device


def _why_torch_sees_none(num_devices: int) -> str:
    """Of devices that the driver lists."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it gives no reason"
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
    torch_build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    driver = describe_driver() or "unknown driver"
    number = "1 NVIDIA device" if num_devices == 1 else f"{num_devices} NVIDIA devices"
    return f"this machine has {number} ({driver}), but {torch_build} cannot use them: {reason}"


def is_compiled(torch_compile: bool | None, device: torch.device, layers: Sequence[LayerSpec]) -> bool:
    """Whether torch compiles the layers. torch_compile: the flag; None: on CUDA, unless our Triton kernels compute all
    layers: they are faster (docs/gpu.md), and nothing waits for a compiler."""
    if torch_compile is not None:
        return torch_compile
    return device.type == "cuda" and not (uses_triton(device, "layers") and has_fused_layers(layers))


def choose_dtype(name: str | None, device: torch.device, kernels: Kernels | None, is_compiled: bool) -> torch.dtype:
    """The dtype of the weights in memory.

    name: a torch dtype's name, or None: bfloat16 if the device computes it natively, or if the CPU kernels widen it
    when they load it; else float32.
    is_compiled: torch compiles the layers, and computes in the dtype in which the weights are stored.
    """
    if name is not None:
        return _DTYPES[name]
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif kernels is not None:
        has_bfloat16 = kernels.has_bfloat16_arithmetic or not is_compiled
    else:
        has_bfloat16 = _cpu_has_bfloat16()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def choose_activation_dtype(dtype: torch.dtype, kernels: Kernels | None, is_compiled: bool) -> torch.dtype:
    """The dtype of hidden states for weights of `dtype`: the same, or the dtype to which the CPU kernels widen them.

    is_compiled: torch compiles the layers.
    """
    return dtype if kernels is None or is_compiled else kernels.activation_dtype(dtype)


def choose_kv_cache_dtype(name: str | None, dtype: torch.dtype, activation_dtype: torch.dtype) -> torch.dtype:
    """name: a torch dtype's name, or None: the weights' `dtype`, or float16 if activation_dtype differs from it.

    float16 has the size of bfloat16 and three more bits of precision, and the processor widens it in one instruction.
    """
    if name is not None:
        return _DTYPES[name]
    return dtype if activation_dtype == dtype else torch.float16


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively; emulated bfloat16 is slower than float32."""
    try:
        return any(level.multiplies_bfloat16 for level in machine_sets())
    except LibraryUnavailable:  # no compiler: torch can ask the processor too, on x86 only
        return bool(torch.cpu._is_avx512_bf16_supported())


def set_worker_threads(config: ServerConfig, place: Place | None = None) -> int:
    """Set the number of torch's threads for one of this machine's workers, and return it. place: of its replica.

    OMP_NUM_THREADS overrides it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        num_sharing, num_cores = num_replicas(config), available_cores()
        if place is not None:
            num_cores = min(len(place.cores), available_cores(place.num_sharing / num_sharing))
            num_sharing = place.num_sharing
        num_ranks = config.pp_size * config.tp_size
        torch.set_num_threads(worker_threads(num_cores, torch.get_num_threads(), num_sharing * num_ranks))
    return torch.get_num_threads()


@contextmanager
def leave_threads_to(kernels: Kernels) -> Iterator[None]:
    """Inside, the kernels use as many threads as torch did, and torch uses one.

    Torch's remaining work in such forwards is small, but an OpenMP region waits for every thread, even for one that
    sleeps or whose core runs another process.
    """
    num_threads = torch.get_num_threads()
    kernels.set_num_threads(num_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def worker_threads(num_cores: int, max_threads: int, num_workers: int) -> int:
    """Threads of each of num_workers on num_cores.

    max_threads: torch's default number of threads; with hyper-threading, one per physical core.
    """
    num_free = num_cores - 1 if num_cores >= _SPARES_ONE_FROM else num_cores
    return max(1, min(num_free, max_threads) // num_workers)


class Stopwatch(Protocol):
    """Times calls on one device."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds for which the device computes what `call` launches."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch by events on CUDA, by the process's clock elsewhere."""
    return _EventStopwatch(device) if device.type == "cuda" else _ClockStopwatch()


class _ClockStopwatch:
    """On a CPU, a call computes before it returns."""

    def seconds(self, call: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s


class _EventStopwatch:
    """Two CUDA events around the call's kernels. Other work is queued before them, so that all of them are launched
    before the first one starts: otherwise the device would wait for Python between short kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factor = torch.zeros((_FILLING_SIZE, _FILLING_SIZE), dtype=torch.bfloat16, device=device)
        self._product = torch.zeros_like(self._factor)

    def seconds(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            for _ in range(_NUM_FILLING_GEMMS):
                torch.mm(self._factor, self._factor, out=self._product)
            start.record()
            call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
