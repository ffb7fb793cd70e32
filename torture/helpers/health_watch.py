"""Asks /health all the time, from a process of its own, which no other client delays."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.end_to_end.helpers.completions import get_status

PAUSE_S = 0.02


@dataclass
class HealthWatch:
    """Filled at the end of `watched_health`."""

    num_asked: int = 0
    longest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """One for each connection that was refused or reset, and each status other than 200."""


@contextmanager
def watched_health(port: int) -> Iterator[HealthWatch]:
    """Asks over a new connection each time, until the end of the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(port, theirs), daemon=True)
    process.start()
    watch = HealthWatch()
    try:
        assert ours.poll(60), "the watcher did not start"
        ours.recv()
        yield watch
        ours.send("stop")
        assert ours.poll(60), "the watcher did not end"
        watch.num_asked, watch.longest_s, watch.faults = ours.recv()
    finally:
        process.kill()
        process.join()


def _watch(port: int, pipe: Connection) -> None:
    num_asked, longest_s = 0, 0.0
    faults: list[str] = []
    pipe.send("started")
    while not pipe.poll(PAUSE_S):
        began_s = time.monotonic()
        try:
            status = get_status(port, "/health")
            if status != 200:
                faults.append(f"status {status}")
        except OSError as error:
            faults.append(f"{type(error).__name__} {error}")
        num_asked += 1
        longest_s = max(longest_s, time.monotonic() - began_s)
    pipe.send((num_asked, longest_s, faults))
