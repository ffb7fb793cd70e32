"""Build the kernels in a separate process while the model is downloaded and the workers start."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokasaurus.config import ServerConfig
from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.isa import PLAIN_TORCH, choose_set

_CUDA_DEVICE = Path("/dev/nvidia0")


@contextmanager
def kernels_built_ahead(config: ServerConfig, show_progress: Callable[[str], None]) -> Iterator[None]:
    """Inside, a process builds the kernels that the workers will need, unless they exist; it is killed at the end.

    A worker waits for the build. If it fails, the worker reports the error.

    Raises UserError if the processor lacks the instruction set that config.cpu_isa names.
    """
    name = _missing_library(config)
    if name is None:
        yield
        return
    show_progress("compiling the CPU kernels, at the first start only")
    # In its own session, so that its compilers can be killed with it.
    command = [sys.executable, "-m", build.__name__, name]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _missing_library(config: ServerConfig) -> str | None:
    """The name of the instruction set to build for; None if no build is needed or possible."""
    may_use_cuda = config.device == "cuda" or (config.device is None and _CUDA_DEVICE.exists())
    if may_use_cuda or config.cpu_isa == PLAIN_TORCH:
        return None
    try:
        level = choose_set(config.cpu_isa, build.machine_sets())
        return None if level is None or build.is_there(build.kernel_library(level)) else level.name
    except build.LibraryUnavailable:
        return None
