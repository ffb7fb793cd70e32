"""Whether Triton's kernels take the place of plain torch."""

import functools
import importlib.util

import torch


def uses_triton(device: torch.device) -> bool:
    """Whether Triton is installed and runs on tensors of this device."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
