"""Whether Triton's kernels take the place of plain torch, for each group of kernels."""

import functools
import importlib.util
from typing import Literal, TypeAlias

import torch

KernelGroup: TypeAlias = Literal["attention", "sampling", "layers", "steps"]

_switched_off: set[KernelGroup] = set()


def uses_triton(device: torch.device, group: KernelGroup) -> bool:
    """Whether Triton is installed, runs on tensors of this device, and the group is not switched off."""
    return device.type == "cuda" and group not in _switched_off and _has_triton()


def switch_off(group: KernelGroup) -> None:
    """Let plain torch compute what these kernels do, from now on, in this process."""
    _switched_off.add(group)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
