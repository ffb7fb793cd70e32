"""What `ps` and `pgrep` call a process."""

import ctypes
import sys

from setproctitle import setproctitle

# From linux/prctl.h.
_PR_SET_NAME = 15
MAX_NAME_BYTES = 15


def set_title(name: str, title: str = "") -> None:
    """name: what `pgrep` finds, at most MAX_NAME_BYTES. title: in place of the command line, which may have keys; by
    default the name. Call it in the main thread."""
    setproctitle(title or name)
    if sys.platform == "linux":  # the title would be the name too
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:MAX_NAME_BYTES], 0, 0, 0)
