"""Resident memory of this process and its peak, on Linux."""

import re
from pathlib import Path


def reset_peak() -> int:
    """Restart the peak at the current value -> bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Largest number of resident bytes since `reset_peak`."""
    return _status("VmHWM")


def anonymous() -> int:
    """Bytes resident now, without mapped files."""
    return _status("RssAnon")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
