"""Starts a server of this project for one benchmark, and watches it: how fast /health answers, and peak memory."""

import http.client
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from tokasaurus.commands.bench.client import ServerError

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
def own_server(
    flags: Sequence[str], start_timeout_s: float | None = None, log: IO[str] | None = None
) -> Iterator[OwnServer]:
    """Run `toka` with these flags on a free port while the block runs.

    Yields when it is ready. If it does not start, within `start_timeout_s` seconds if that is given, raises ServerError
    with its last lines of output. `log` gets all of its output at once. Its files and batches are removed at the end,
    unless the flags say where they are stored."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "tokasaurus", f"port={port}", NEUTRAL, *flags]
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
        # A pipe that nobody reads would hold up what the server writes.
        rest = threading.Thread(target=_keep_all, args=(process.stdout, log), daemon=True)
        too_late.start()
        try:
            lines = deque[str](maxlen=_NUM_LINES_KEPT)
            while not any(line.startswith("ready:") for line in lines):
                if not (line := process.stdout.readline()):
                    raise ServerError("the server did not start:\n" + "".join(lines))
                lines.append(line)
                _keep(line, log)
            too_late.cancel()
            rest.start()
            yield OwnServer(f"http://127.0.0.1:{port}/v1", process.pid, tuple(line.rstrip() for line in lines))
        finally:
            too_late.cancel()
            process.terminate()
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if rest.is_alive():
                rest.join(_STOP_TIMEOUT_S)


def _keep(line: str, log: IO[str] | None) -> None:
    if log is not None:
        log.write(line)
        log.flush()


def _keep_all(lines: Iterable[str], log: IO[str] | None) -> None:
    for line in lines:
        _keep(line, log)


NEUTRAL = "sampling_defaults=neutral"
"""A model's own defaults would add a penalty or a limit to what is measured."""

PAUSE_S = 0.02
_TIMEOUT_S = 60.0


@dataclass
class ServerWatch:
    """Filled at the end of `watched_server`."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    """(when /health was asked by time.monotonic(), seconds until its answer) of each new connection."""
    growth_bytes: int = 0
    """Peak memory (RSS) of the server process, above its memory at the start."""
    children_bytes: int = 0
    """Peak memory of one of its child processes, as they validate input files."""

    def health_s(self, from_s: float, to_s: float) -> list[float]:
        """Seconds of each answer to /health asked between two times."""
        return [seconds for asked_s, seconds in self.answers if from_s <= asked_s <= to_s]


@contextmanager
def watched_server(server: OwnServer) -> Iterator[ServerWatch]:
    """Watches within the context. Raises ServerError at its end if /health failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pid = server.server_pid()
    process = context.Process(target=_watch, args=(server.base_url, pid, theirs), daemon=True)
    process.start()
    watch = ServerWatch()
    try:
        ours.recv()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM restarts at the present value
        before = _memory(pid, "VmRSS")
        yield watch
        watch.growth_bytes = _memory(pid, "VmHWM") - before
        ours.send("stop")
        watch.answers, watch.children_bytes, fault = ours.recv()
        if fault:
            raise ServerError(f"/health: {fault}")
    finally:
        process.kill()
        process.join()


def _watch(base_url: str, pid: int, pipe: Connection) -> None:
    answers: list[tuple[float, float]] = []
    children_bytes, fault = 0, ""
    pipe.send("started")
    while not pipe.poll(PAUSE_S):
        asked_s = time.monotonic()
        try:
            _ask_health(urlsplit(base_url).netloc)
        except OSError as error:
            fault = repr(error)
        answers.append((asked_s, time.monotonic() - asked_s))
        for child in child_pids(pid):
            children_bytes = max(children_bytes, _memory(child, "VmHWM"))
    pipe.send((answers, children_bytes, fault))


def _ask_health(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
    finally:
        connection.close()


def _memory(pid: int, name: str) -> int:
    """Bytes; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, flags=re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])
