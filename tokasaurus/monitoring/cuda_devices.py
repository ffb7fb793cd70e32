"""NVIDIA's devices on this machine, by the driver's library and the files of torch: importing torch takes seconds."""

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace


@dataclass(frozen=True, slots=True)
class CudaDevices:
    """The CUDA devices that torch will see."""

    count: int
    largest_bytes: int
    """Memory of the one that has most."""
    num_unused: int = 0
    """Devices of a machine whose torch is a build for CPUs."""


def cuda_devices() -> CudaDevices | None:
    """None if it is not known: torch is not built for NVIDIA's devices, or their library is not found where it is."""
    built = _torch_build()
    if built.cuda is None:
        return CudaDevices(0, 0, len(_memory_of_devices() or ())) if built.hip is None else None
    memory_bytes = _memory_of_devices()
    if memory_bytes is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(memory_bytes) if visible is None else _num_visible(visible, len(memory_bytes))
    return CudaDevices(count, max(memory_bytes, default=0))


def _num_visible(listed: str, num_devices: int) -> int:
    """Entries of CUDA_VISIBLE_DEVICES before the first that names no device, such as Slurm's NoDevFiles; the UUIDs of
    devices and of MIG instances are believed."""
    count = 0
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        is_number = re.fullmatch(r"[+-]?\d+", entry) is not None and 0 <= int(entry) < num_devices
        if not is_number and not entry.startswith(("GPU-", "MIG-")):
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


def describe_driver() -> str:
    """Its version, and the newest CUDA that it runs; "" if its library does not tell."""
    text, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if (
        nvml.nvmlInit_v2() != 0
        or nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0
        or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)) != 0
    ):
        return ""
    nvml.nvmlShutdown()
    return (
        f"driver {text.value.decode(errors='replace')}, for CUDA up to {cuda.value // 1000}.{cuda.value % 1000 // 10}"
    )
