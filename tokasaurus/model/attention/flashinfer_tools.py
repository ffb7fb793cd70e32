"""Finds what FlashInfer compiles its kernels with, where it does not look itself."""

import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_TOOLKITS = Path("/usr/local")


def find_cuda(environment: Mapping[str, str], toolkits: Path = _TOOLKITS) -> Path | None:
    """CUDA's toolkit: a directory with nvcc and the runtime's headers; None if there is none.

    FlashInfer takes CUDA_HOME, or else what lies around the nvcc of PATH, which may be a script elsewhere."""
    named = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    if on_path is not None:
        named.append(Path(on_path).resolve().parents[1])
    for directory in (*named, toolkits / "cuda", *sorted(toolkits.glob("cuda-*"), reverse=True)):
        if (directory / "bin/nvcc").exists() and (directory / "include/cuda_runtime.h").exists():
            return directory
    return None


def provide_tools(environment: MutableMapping[str, str], toolkits: Path = _TOOLKITS) -> None:
    """Sets CUDA_HOME, and adds the folder of this Python's programs to PATH if ninja is only there: a program of a
    virtual environment may run without the environment being activated."""
    cuda = find_cuda(environment, toolkits)
    if cuda is not None:
        environment["CUDA_HOME"] = str(cuda)
    programs = Path(sys.executable).parent
    if _which_ninja(environment) is None and (programs / "ninja").exists():
        environment["PATH"] = os.pathsep.join(filter(None, (environment.get("PATH"), str(programs))))


def missing_tools(environment: Mapping[str, str], toolkits: Path = _TOOLKITS) -> list[str]:
    """Of nvcc and ninja, after `provide_tools`."""
    found = {"nvcc": find_cuda(environment, toolkits), "ninja": _which_ninja(environment)}
    return [name for name, place in found.items() if place is None]


def _which_ninja(environment: Mapping[str, str]) -> str | None:
    return shutil.which("ninja", path=environment.get("PATH", ""))
