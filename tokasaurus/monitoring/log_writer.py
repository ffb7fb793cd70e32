"""Logging of one process: lines on stderr that name the process. Prompts and completions are logged only at debug.

A thread writes to stderr: nothing else in the process waits for whoever reads its log. The launcher's thread writes for
all processes: the others' stderr is a pipe to it (LogRelay in processes/group).
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokasaurus.monitoring.log_lines import (
    LogLine,
    Output,
    Status,
    StreamOutput,
    as_json,
    as_relayed,
    as_text,
)

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


@dataclass
class _Window:
    """A second in which only the first of several warnings of one kind is written."""

    last: LogLine
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

    def __init__(self, output: Output | None = None, process: str = "") -> None:
        """output: None for messages alone on stderr. process: names this one in lines."""
        super().__init__()
        self.output: Output = output or StreamOutput(STDERR, lambda line: line.message)
        self.process = process
        self.num_dropped = 0
        """Records dropped since start, and lines of other output."""
        self._num_reported = 0
        # Unlike Queue, SimpleQueue takes no lock that a signal handler could find taken. An Event asks for a flush.
        self._queue: queue.SimpleQueue[LogLine | threading.Event] = queue.SimpleQueue()
        self._windows: dict[str, _Window] = {}
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, which holds the handler's lock."""
        try:
            line = self._line_of(record)
            is_limited = record.name == _LIMITED_LOGGER and record.levelno == logging.WARNING
            if not (is_limited and self._is_suppressed(str(record.msg), line)):
                self.put_line(line)
        except Exception:  # arguments that do not fit the record's text must not fail the caller
            self._count_dropped()

    def _line_of(self, record: logging.LogRecord) -> LogLine:
        level = record.levelname.lower() if record.levelno > logging.DEBUG else "debug"
        fields = vars(record).get("fields")
        return LogLine(self.format(record), level, self.process, record.name, record.created, fields)

    def put(self, text: str) -> None:
        """Queue the text of a line, or drop it."""
        self.put_line(LogLine(text.removesuffix("\n"), process=self.process))

    def put_line(self, line: LogLine) -> None:
        """Queue it, or drop it."""
        if self._queue.qsize() >= MAX_LINES:
            self._count_dropped()
        else:
            if len(line.message) > _MAX_CHARS:
                line = replace(line, message=line.message[:_MAX_CHARS] + " …")
            self._queue.put(line)

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= MAX_LINES

    def show_status(self, status: Status) -> None:
        """Show this besides the lines, until another status is given: `no_status` for none."""
        self.output.status = status
        self._queue.put(threading.Event())

    def flush_lines(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything queued so far is written. False after `timeout_s`.

        The timeout includes the time for which a write is already blocked, so a second call does not wait again.
        """
        began_s = self.output.blocked_since_s
        blocked_s = 0.0 if began_s is None else time.monotonic() - began_s
        done = threading.Event()
        self._queue.put(done)
        return done.wait(max(0.0, timeout_s - blocked_s))

    def _is_suppressed(self, kind: str, line: LogLine) -> bool:
        window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = _Window(line, time.monotonic())
            return False
        window.last = line
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
                timeouts_s = [self.output.refresh(), _WINDOW_S if self._windows else None]
                timeout_s = min((seconds for seconds in timeouts_s if seconds is not None), default=None)
                item = self._queue.get(timeout=timeout_s)
                if isinstance(item, threading.Event):
                    flushed = item
                else:
                    self._write(item)
            except queue.Empty:
                pass
            self._end_windows(time.monotonic() - (_WINDOW_S if flushed is None else 0.0))
            if flushed is not None:
                self.output.flush()
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
            message = f"{window.last.message} ({window.num_suppressed:,} more of these)"
            self._write(replace(window.last, message=message))

    def _write(self, line: LogLine) -> None:
        if not self.output.write(line):
            self._count_dropped()
            return
        num_new = self.num_dropped - self._num_reported
        if num_new > 0 and self.output.write(LogLine(f"{num_new:,} log lines dropped", "warning", self.process)):
            self._num_reported += num_new


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


def is_terminal() -> bool:
    """Whether stderr is a terminal on which lines can be changed."""
    return os.isatty(STDERR) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def people_output() -> Output:
    """Stderr, for people: this process alone writes to it."""
    if not is_terminal():
        return StreamOutput(STDERR, as_text)
    from tokasaurus.monitoring.terminal import TerminalOutput

    return TerminalOutput(STDERR)


@functools.cache
def log_writer() -> LogWriter:
    """The writer of this process to stderr; the end of the process waits for it, at most FLUSH_TIMEOUT_S."""
    writer = LogWriter()
    atexit.register(writer.flush_lines)
    return writer


def setup_logging(config: ServerConfig, process: str, is_relayed: bool = False, has_terminal: bool = False) -> None:
    """Log this process to stderr, replacing existing handlers. From now on no log line or print to stderr blocks.

    is_relayed: stderr is a pipe to a process that reads lines with `from_relayed`. has_terminal: if stderr is a
    terminal, this process alone writes to it.

    Levels: config.log_level for tokasaurus and uvicorn, warning for all other packages.
    Start uvicorn with `log_config=None`, or it installs its own handlers.
    """
    handler = log_writer()
    handler.process = process
    if is_relayed:
        handler.output = StreamOutput(STDERR, as_relayed)
    elif config.log_format == "json":
        handler.output = StreamOutput(STDERR, as_json)
    else:
        handler.output = people_output() if has_terminal else StreamOutput(STDERR, as_text)
    sys.stderr = QueuedStderr(handler)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("tokasaurus", "uvicorn"):
        logging.getLogger(name).setLevel(config.log_level.upper())
