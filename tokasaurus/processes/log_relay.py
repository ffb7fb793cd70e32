"""What other processes write to stderr comes to this process, whose LogWriter writes it: one writer for one terminal.

Each process has a pipe of its own, so that no line lies in the middle of another one's. If nobody reads stderr, this
process's LogWriter is full, a pipe fills up, and the other process's LogWriter drops and counts what it cannot write.
"""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

from tokasaurus.monitoring.log_lines import from_relayed
from tokasaurus.monitoring.log_writer import LogWriter

_MAX_BYTES = 1 << 20
"""Most bytes of a line; a longer one is cut into several."""
_FULL_S = 0.05
"""Pause until the LogWriter is asked again whether it has space."""


class LogRelay:
    """Passes on the lines of one process until its end of the pipe is closed. process: its name in lines."""

    def __init__(self, reader: Connection, writer: LogWriter, process: str) -> None:
        self._writer = writer
        self._process = process
        self._thread = threading.Thread(target=self._run, args=(reader,), name=f"log of {process}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is passed on that the process has written. Precondition: it has ended."""
        self._thread.join(timeout_s)

    def _run(self, reader: Connection) -> None:
        with reader, open(reader.fileno(), "rb", closefd=False) as lines:  # a descriptor
            while line := lines.readline(_MAX_BYTES):
                while self._writer.is_full:
                    time.sleep(_FULL_S)
                text = line.decode(errors="backslashreplace").removesuffix("\n")
                self._writer.put_line(from_relayed(text, self._process))
