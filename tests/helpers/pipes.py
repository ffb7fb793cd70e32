"""Pipes and terminals: one that is full, and reading with a limit."""

import os
import select
import time
from collections.abc import Callable


def fill_pipe(writer: int) -> None:
    """Write to the pipe until there is no room for another byte, so that the next write blocks."""
    os.set_blocking(writer, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(writer, b"x" * size)
        except BlockingIOError:
            pass
    os.set_blocking(writer, True)


def read_until(reader: int, is_enough: Callable[[bytes], bool], timeout_s: float = 60) -> bytes:
    """What a pipe or terminal has to read, from now until is_enough of all that came; fails after timeout_s."""
    content = b""
    deadline = time.monotonic() + timeout_s
    while not is_enough(content):
        ready, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"nothing more after {timeout_s} s: {content!r}"
        read = os.read(reader, 1 << 16)
        assert read, f"the other end is closed: {content!r}"
        content += read
    return content
