"""Child processes of the server that work on what clients send: limits that each sets for itself, on Linux."""

import ctypes
import resource
import signal
import sys
from pathlib import Path

import psutil

PACKAGE_PARENT = Path(__file__).parents[2]
"""Working directory for `python -m`, which imports from it: the user's may contain any module."""

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def limit_memory(num_bytes: int) -> None:
    """No core dumps, and at most so much more address space than the process uses now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))


def die_with_server(name: str) -> None:
    """name: of the process, at most 15 characters. On other systems the process ends at the end of stdin."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
