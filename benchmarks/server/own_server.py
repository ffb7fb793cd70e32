"""Starts a server of this project for one benchmark."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throughput.client import ServerError

_STOP_TIMEOUT_S = 20
_NUM_LINES_KEPT = 20


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that is ready."""

    base_url: str
    """Up to and including /v1."""
    launcher_pid: int
    start_lines: tuple[str, ...] = ()
    """What it printed last until it was ready."""

    def server_pid(self) -> int:
        """Process id of the HTTP server. Linux only."""
        return next(
            pid for pid in child_pids(self.launcher_pid) if Path(f"/proc/{pid}/comm").read_text() == "toka-server\n"
        )


def child_pids(parent: int) -> list[int]:
    """Ids of the processes whose parent has the id `parent`. Linux only."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for listing in children for pid in listing.read_text().split()]


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[str]:
    """As `own_server`; yields the base URL alone."""
    with own_server(flags) as server:
        yield server.base_url


@contextmanager
def own_server(flags: Sequence[str], start_timeout_s: float | None = None) -> Iterator[OwnServer]:
    """Run `toka` with these flags on a free port while the block runs.

    Yields when it is ready. If it does not start, within `start_timeout_s` seconds if that is given, raises ServerError
    with its last lines of output. Its files and
    batches are removed at the end, unless the flags say where they are stored."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "tokasaurus", f"port={port}", "uvicorn_log_level=warning", *flags]
    with (
        tempfile.TemporaryDirectory() as data_home,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"XDG_DATA_HOME": data_home},
        ) as process,
    ):
        assert process.stdout is not None
        too_late = threading.Timer(threading.TIMEOUT_MAX if start_timeout_s is None else start_timeout_s, process.kill)
        too_late.daemon = True
        too_late.start()
        try:
            lines = deque[str](maxlen=_NUM_LINES_KEPT)
            while not any(line.startswith("ready:") for line in lines):
                if not (line := process.stdout.readline()):
                    raise ServerError("the server did not start:\n" + "".join(lines))
                lines.append(line)
            too_late.cancel()
            yield OwnServer(f"http://127.0.0.1:{port}/v1", process.pid, tuple(line.rstrip() for line in lines))
        finally:
            too_late.cancel()
            process.terminate()
            try:
                process.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
