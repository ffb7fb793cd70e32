"""Logging of one process: lines on stderr that name the process. Prompts and completions are logged only at debug.

A thread writes to stderr: nothing else in the process waits for whoever reads its log.
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
import os
import queue
import select
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

FLUSH_TIMEOUT_S = 1.0
"""Longest wait for unwritten lines when a process ends."""

STDERR = 2
MAX_LINES = 1000
_MAX_CHARS = 16_384
_WINDOW_S = 1.0

_LIMITED_LOGGER = "uvicorn.error"
"""Warns of each malformed HTTP request, so any client can cause any number of warnings."""

_UVICORN_TRACE = 5  # uvicorn's own level below debug


@dataclass
class _Window:
    """A second in which only the first of several warnings of one kind is written."""

    last: logging.LogRecord
    began_s: float
    num_suppressed: int = 0


# logging.handlers.QueueListener would cost a promise: at its end it waits for its thread without a time limit, so a
# process whose stderr nobody reads would never exit.
class LogWriter(logging.Handler):
    """Queues text for a thread that writes it to a file descriptor. Only `flush_lines` waits for that thread.

    When the queue is full, since nobody reads the other end of stderr, text is dropped and counted; once writing works
    again, a line says how much. Warnings of the web server: at most one line per kind and second; the next line says
    how many were suppressed.

    The thread uses the descriptor, since a blocked write to sys.stderr would keep a lock that Python takes at exit.
    """

    def __init__(self, descriptor: int = STDERR) -> None:
        super().__init__()
        self.num_dropped = 0
        """Records dropped since start, and lines of other output."""
        self._num_reported = 0
        self._descriptor = descriptor
        # Unlike Queue, SimpleQueue takes no lock that a signal handler could find taken. An Event asks for a flush.
        self._queue: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._windows: dict[str, _Window] = {}
        self._write_began_s: float | None = None
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, which holds the handler's lock."""
        try:
            line = self.format(record) + "\n"
            if record.name == _LIMITED_LOGGER and record.levelno == logging.WARNING and self._is_suppressed(record):
                return
            self.put(line)
        except Exception:  # arguments that do not fit the record's text must not fail the caller
            self._count_dropped()

    def put(self, text: str) -> None:
        """Queue the text of a line, or drop it."""
        if self._queue.qsize() >= MAX_LINES:
            self._count_dropped()
        else:
            self._queue.put(text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " …\n")

    def flush_lines(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything queued so far is written. False after `timeout_s`.

        The timeout includes the time for which a write is already blocked, so a second call does not wait again.
        """
        began_s = self._write_began_s
        blocked_s = 0.0 if began_s is None else time.monotonic() - began_s
        done = threading.Event()
        self._queue.put(done)
        return done.wait(max(0.0, timeout_s - blocked_s))

    def _is_suppressed(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = _Window(record, time.monotonic())
            return False
        window.last = record
        window.num_suppressed += 1
        return True

    def _count_dropped(self) -> None:
        self.acquire()
        self.num_dropped += 1
        self.release()

    def _run(self) -> None:
        while True:
            flushed = None
            try:
                item = self._queue.get(timeout=_WINDOW_S if self._windows else None)
                if isinstance(item, threading.Event):
                    flushed = item
                else:
                    self._write(item)
            except queue.Empty:
                pass
            self._end_windows(time.monotonic() - (_WINDOW_S if flushed is None else 0.0))
            if flushed is not None:
                flushed.set()

    def _end_windows(self, began_before_s: float) -> None:
        """Report what was suppressed in each window that began before that time; the report begins the next window."""
        over: list[_Window] = []
        self.acquire()
        for kind, window in list(self._windows.items()):
            if window.began_s > began_before_s:
                continue
            if window.num_suppressed:
                over.append(window)
                self._windows[kind] = _Window(window.last, time.monotonic())
            else:
                del self._windows[kind]
        self.release()
        for window in over:
            self._write(f"{self.format(window.last)} ({window.num_suppressed:,} more of these)\n")

    def _write(self, text: str) -> None:
        if not self._write_all(text):
            self._count_dropped()
            return
        num_dropped = self.num_dropped
        if num_dropped > self._num_reported and self._write_all(
            f"{num_dropped - self._num_reported:,} log lines dropped\n"
        ):
            self._num_reported = num_dropped

    def _write_all(self, text: str) -> bool:
        """Wait until all is written; False if that is impossible, because the other end is closed."""
        left = text.encode(errors="backslashreplace")
        self._write_began_s = time.monotonic()
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # a process that shares the pipe has made it non-blocking
                    select.select([], [self._descriptor], [])
        except OSError:
            return False
        finally:
            self._write_began_s = None
        return True


class QueuedStderr(io.TextIOBase):
    """Stands in for sys.stderr, so that prints, warnings and tracebacks of threads also go through the LogWriter."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._begun = threading.local()

    def write(self, text: str) -> int:
        """Passes on whole lines: print() writes a line and its end separately."""
        self._begun.text = getattr(self._begun, "text", "") + text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._begun.text = getattr(self._begun, "text", ""), ""
        if text:
            self._writer.put(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


@functools.cache
def log_writer() -> LogWriter:
    """The writer of this process to stderr; the end of the process waits for it, at most FLUSH_TIMEOUT_S."""
    writer = LogWriter()
    atexit.register(writer.flush_lines)
    return writer


def setup_logging(config: ServerConfig, process: str) -> None:
    """Log this process to stderr, replacing existing handlers. From now on no log line or print to stderr blocks.

    Levels: config.log_level for tokasaurus, config.uvicorn_log_level for uvicorn, warning for all other packages.
    Start uvicorn with `log_config=None`, or it installs its own handlers.
    """
    handler = log_writer()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    sys.stderr = QueuedStderr(handler)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tokasaurus").setLevel(config.log_level.upper())
    uvicorn_level = config.uvicorn_log_level
    logging.getLogger("uvicorn").setLevel(_UVICORN_TRACE if uvicorn_level == "trace" else uvicorn_level.upper())
