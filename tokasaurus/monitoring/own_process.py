"""What a process tells the system of itself: what `ps` and `pgrep` call it, and that it ends with its parent."""

import ctypes
import signal
import sys

from setproctitle import setproctitle

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
MAX_NAME_BYTES = 15


def set_title(name: str, title: str = "") -> None:
    """name: what `pgrep` finds, at most MAX_NAME_BYTES. title: in place of the command line, which may have keys; by
    default the name. Call it in the main thread."""
    setproctitle((title or name).encode(errors="backslashreplace").decode())
    _prctl(_PR_SET_NAME, name.encode()[:MAX_NAME_BYTES])  # else the title would be the name too


def kill_with_parent() -> None:
    """From now on, the death of the parent kills this process; on Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
