"""Watches a server of this project from a process of its own: how fast /health answers, and peak memory."""

import http.client
import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.server.own_server import OwnServer, child_pids
from benchmarks.throughput.client import ServerError

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
