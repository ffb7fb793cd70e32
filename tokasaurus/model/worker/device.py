"""The device and the number format to compute in."""

import torch

from tokasaurus.messages.lifecycle import UserError
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.cpu.build import LibraryUnavailable, machine_sets

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(name: str | None) -> torch.device:
    """name: "cpu", "cuda", or None for CUDA where there is one. Raises UserError if it is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device on this machine")
    return torch.device(name)


def choose_dtype(name: str | None, device: torch.device, kernels: Kernels | None, is_compiled: bool) -> torch.dtype:
    """Of the weights in memory. name: of a torch dtype, or None: bfloat16 where the device computes it, or where the
    CPU's kernels widen it on the way to the registers; else float32. is_compiled: layers are compiled by torch, which
    computes in the type that weights are stored in."""
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
    """Of hidden states beside weights of `dtype`: the same, or what the CPU's kernels widen these to. is_compiled:
    layers are compiled by torch."""
    return dtype if kernels is None or is_compiled else kernels.activation_dtype(dtype)


def choose_kv_cache_dtype(name: str | None, dtype: torch.dtype, activation_dtype: torch.dtype) -> torch.dtype:
    """name: of a torch dtype, or None: that of the weights, dtype. Where they are widened to another activation_dtype,
    float16: as small, three bits more exact, and measured faster, as the processor widens it in one instruction."""
    if name is not None:
        return _DTYPES[name]
    return dtype if activation_dtype == dtype else torch.float16


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; emulated, it is slower than float32."""
    try:
        return any(level.multiplies_bfloat16 for level in machine_sets())
    except LibraryUnavailable:  # no compiler: torch asks the processor, too, of x86 alone
        return bool(torch.cpu._is_avx512_bf16_supported())
