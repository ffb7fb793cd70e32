"""Whether Triton's kernels take the place of plain torch, for each group of kernels."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch

KernelGroup: TypeAlias = Literal["attention", "sampling", "layers", "steps", "adapters", "experts"]

_switched_off: set[KernelGroup] = set()


def uses_triton(device: torch.device, group: KernelGroup) -> bool:
    """Whether Triton is installed, runs on tensors of this device, and the group is not switched off."""
    return device.type == "cuda" and group not in _switched_off and _has_triton()


def groups_in_use(device: torch.device, *groups: KernelGroup) -> list[KernelGroup]:
    """The `groups` whose kernels are used on this device."""
    return [group for group in groups if uses_triton(device, group)]


def switch_off(group: KernelGroup) -> None:
    """Let plain torch compute what these kernels do, from now on, in this process."""
    _switched_off.add(group)


@contextmanager
def switched_off(group: KernelGroup) -> Iterator[None]:
    """Inside, plain torch computes what these kernels do. Precondition: they are in use."""
    _switched_off.add(group)
    try:
        yield
    finally:
        _switched_off.remove(group)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
