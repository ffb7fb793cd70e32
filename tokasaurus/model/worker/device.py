"""Choose the device and the dtypes of weights, activations and KV cache."""

import torch

from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.cpu.build import LibraryUnavailable, machine_sets

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(name: str | None, index: int) -> torch.device:
    """The device of a worker. A CUDA device becomes the calling thread's current one.

    name: "cpu", "cuda", or None: CUDA if available, else CPU.
    index: among the workers of all replicas. Each has a CUDA device of its own; all share a CPU.
    Raises FlagRefused if CUDA is asked for and missing, or has too few devices.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
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


def is_compiled(torch_compile: bool | None, device: torch.device) -> bool:
    """Whether torch compiles the layers. torch_compile: the flag; None: on CUDA, where it is faster."""
    return device.type == "cuda" if torch_compile is None else torch_compile


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
