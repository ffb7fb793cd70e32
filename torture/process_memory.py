"""Memory and file descriptors of a process, from /proc."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
SETTLE_S = 5.0
"""After a load, this long passes before the memory is read once more."""


def rss_bytes(pid: int) -> int:
    """Memory in use (VmRSS)."""
    return _status_bytes(pid, "VmRSS")


def num_open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@dataclass(frozen=True)
class Growth:
    """Bytes above a base."""

    peak: int
    later: int
    """SETTLE_S after the load."""

    def __str__(self) -> str:
        return f"peak {self.peak / MB:+.0f} MB, after {SETTLE_S:.0f} s {self.later / MB:+.0f} MB"


def measure_growth(pid: int, base_bytes: int, load: Callable[[], object]) -> Growth:
    """Runs `load` -> how much more memory than `base_bytes` the process had, at most meanwhile and later."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM restarts at the present value
    load()
    peak = _status_bytes(pid, "VmHWM")
    time.sleep(SETTLE_S)
    return Growth(peak - base_bytes, rss_bytes(pid) - base_bytes)


def _status_bytes(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    assert found is not None, f"/proc/{pid}/status has no {name}"
    return 1024 * int(found[1])
