"""Checks by process id whether processes run, and that they end."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a zombie has ended; it only waits to be reaped by init


def assert_all_end(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)
