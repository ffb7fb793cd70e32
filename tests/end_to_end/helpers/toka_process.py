"""A real `toka` process, started as a user starts it."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.helpers.limits import join

_START_TIMEOUT_S = 240
_STOP_TIMEOUT_S = 60


@dataclass
class TokaProcess:
    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)
    has_spoken: threading.Event = field(default_factory=threading.Event)
    """Set when it is ready, or has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def gauge(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, flags=re.MULTILINE)
        assert values or f"# TYPE {name} " in text, f"there is no metric {name}"
        return sum(float(value) for value in values)

    def children(self) -> dict[str, int]:
        """Process ids by the title that `ps` shows."""
        return _children(self.process.pid)

    def wait_until_ready(self) -> None:
        self.has_spoken.wait(_START_TIMEOUT_S)
        assert any(line.startswith("ready:") for line in self.lines), "toka did not start:\n" + "\n".join(self.lines)

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=_STOP_TIMEOUT_S)


def _children(launcher: int) -> dict[str, int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(launcher)], capture_output=True, text=True, check=False
    ).stdout  # the exit code is 1 if it has none
    pairs = (line.split(None, 1) for line in listing.splitlines())
    return {title.strip(): int(pid) for pid, title in pairs if title.startswith("toka-")}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {timeout_s} s"
        time.sleep(0.02)


@contextmanager
def not_ready(launcher: int) -> Iterator[None]:
    """Inside, a `toka` that was just started, of this process id, does not become ready: its worker stands still.

    Without this, an idle machine may be ready between two questions.
    """
    wait_for(lambda: "toka-worker-0" in _children(launcher), 60)
    pid = _children(launcher)["toka-worker-0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


_WITH_CONSTANTS = """
import sys
from tokasaurus.cli import main
from tokasaurus.config import ServerConfig
made = ServerConfig.__init__
def make(self, *arguments):
    made(self, *arguments)
    vars(self).update({constants})
ServerConfig.__init__ = make
sys.exit(main())
"""


@contextmanager
def running_toka(*flags: str, **constants: int) -> Iterator[TokaProcess]:
    """Starts `toka` and waits until it is ready; kills it at the end if the test has not stopped it.

    constants: other values of constants of ServerConfig."""
    program = ("-c", _WITH_CONSTANTS.format(constants=constants)) if constants else ("-m", "tokasaurus")
    with starting_toka(free_port(), *flags, program=program) as toka:
        toka.wait_until_ready()
        yield toka


@contextmanager
def starting_toka(port: int, *flags: str, program: tuple[str, ...] = ("-m", "tokasaurus")) -> Iterator[TokaProcess]:
    """Starts `toka`; kills it at the end if the test has not stopped it."""
    command = [sys.executable, *program, f"port={port}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    toka = TokaProcess(process, port)

    def read_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            toka.lines.append(line.rstrip())
            if line.startswith("ready:"):
                toka.has_spoken.set()
        toka.has_spoken.set()

    reader = threading.Thread(target=read_output, daemon=True)
    reader.start()
    try:
        yield toka
    finally:
        process.kill()
        process.wait()
        join(reader)
