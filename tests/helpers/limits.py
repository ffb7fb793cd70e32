"""Waits for threads and processes that fail after a limit of their own, long before the limit of a test."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import IO, Any, AnyStr

LIMIT_S = 60.0


def join(thread: threading.Thread, seconds: float = LIMIT_S) -> None:
    """Wait for the thread's end."""
    thread.join(seconds)
    assert not thread.is_alive(), f"{thread.name} has not ended after {seconds:g} s"


def receive(connection: Connection, seconds: float = LIMIT_S) -> Any:
    """The next message. Raises EOFError if the other end is closed."""
    assert connection.poll(seconds), f"no message within {seconds:g} s"
    return connection.recv()


def read_line(process: subprocess.Popen[AnyStr], output: IO[AnyStr] | None, seconds: float = LIMIT_S) -> AnyStr:
    """The next line of one of the process's outputs; empty at its end. The process is killed if none comes."""
    assert output is not None, "it is no pipe"
    with killed_after(process, seconds):
        return output.readline()


@contextmanager
def killed_after(process: subprocess.Popen[Any], seconds: float = LIMIT_S) -> Iterator[None]:
    """Ends a read of the process's output, if the process itself does not."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
