"""A pipe that is full."""

import os


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
