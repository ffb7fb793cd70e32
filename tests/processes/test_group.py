"""The signals of processes that a program spawns first of all."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

START = """
from tokasaurus.config import ServerConfig
from tokasaurus.processes.group import ChildProcess, ProcessGroup
with ProcessGroup() as group:
    child = group.start(ChildProcess("worker", "toka-worker", "no_module:no_function"), ServerConfig())
    with open(f"/proc/{child.process.pid}/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("SigBlk:")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the signals of a process in /proc")
def test_the_first_process_begins_with_ctrl_c_blocked() -> None:
    """The interrupt of a terminal would show a traceback, until the process has come to ignore it."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", START], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout, 16) & 1 << (signal.SIGINT - 1)
