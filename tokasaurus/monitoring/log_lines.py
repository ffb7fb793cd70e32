"""Lines of a log: what a process says, how it is written for people, programs and other processes, and where to."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

MAX_SILENCE_S = 2.0
"""After this time without a line, one says how far the longest phase of the start is."""
_SHARE_OF_PHASE = 0.1
"""In long phases, such lines come after this share of the time so far."""

RELAYED = "\x1e"
"""Begins a line that one process's LogWriter sends to another's, as JSON. Others are as a library has written them."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a process says."""

    message: str
    level: str = "info"
    process: str = ""
    logger: str = ""
    """Empty for what is no record of a log, and is shown without a time."""
    time_s: float = field(default_factory=time.time)
    fields: Mapping[str, Any] | None = None
    """What the message says, by name, for programs that read the log."""
    indent: int = 0
    """Columns by which a terminal indents all lines of the message but the first."""


def as_text(line: LogLine) -> str:
    if not line.logger:
        return line.message
    time_of_day = datetime.fromtimestamp(line.time_s).isoformat(" ", "milliseconds").replace(".", ",")
    return f"{time_of_day} {line.level.upper()} {line.process}: {line.message}"


def as_json(line: LogLine) -> str:
    """Fields that have the name of an attribute of the line are left out."""
    time_utc = datetime.fromtimestamp(line.time_s, timezone.utc).isoformat(timespec="milliseconds")
    own = {"time": time_utc.replace("+00:00", "Z"), "level": line.level, "process": line.process}
    own |= {"logger": line.logger or "stderr", "message": line.message}
    return json.dumps({**own, **(line.fields or {}), **own}, ensure_ascii=False, default=str)


def as_relayed(line: LogLine) -> str:
    """Read by `from_relayed`."""
    values = (line.message, line.level, line.process, line.logger, line.time_s, line.fields, line.indent)
    return RELAYED + json.dumps(values, default=str)


def from_relayed(text: str, process: str) -> LogLine:
    """A line of another process's stderr, without its end. process: its name, for what a library has written."""
    if text.startswith(RELAYED):
        try:
            return LogLine(*json.loads(text[1:]))
        except (ValueError, TypeError):  # a library's output in its middle
            text = text[1:]
    return LogLine(text, process=process)


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How far one process is with what takes long."""

    process: str
    phase: str
    seconds: float
    """Seconds since the phase began."""
    share: float | None = None
    """Share of the phase that is done, from 0 to 1; None if that is not known."""
    is_expected: bool = False
    """`share` is by the time that an earlier start took."""
    amount: str = ""
    """What is done, such as "93 of 269 MB"."""

    @property
    def percent(self) -> str:
        """Empty if it is not known."""
        if self.share is None:
            return ""
        return f"{'~' if self.is_expected else ''}{100 * self.share:.0f}%"

    def line(self) -> LogLine:
        parts = (self.percent, self.amount)
        text = f"{self.process:>12}  {self.phase:<16} {self.seconds:6.1f} s  {' '.join(filter(None, parts))} ..."
        fields = {"event": "progress", "phase": self.phase, "seconds": round(self.seconds, 2), "share": self.share}
        return LogLine(text, process=self.process, fields=fields)


Status = Callable[[], Sequence[StatusRow]]
"""Called by the thread that writes."""


def no_status() -> Sequence[StatusRow]:
    return ()


class Output(Protocol):
    """Where a LogWriter's thread writes."""

    status: Status
    """What is shown besides the lines, while there is any."""
    blocked_since_s: float | None
    """When the write began that has not ended; by time.monotonic()."""

    def write(self, line: LogLine) -> bool:
        """False if that is impossible, because the other end is closed."""
        ...

    def refresh(self) -> float | None:
        """Show the status. Returns the seconds until the next call; None: none is needed."""
        ...

    def flush(self) -> None:
        """Write what was held back."""
        ...


class Descriptor:
    """Writes to a file descriptor, and waits for its reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.blocked_since_s: float | None = None
        """When the write began that has not ended; by time.monotonic()."""

    def write_all(self, text: str) -> bool:
        """Wait until all is written; False if that is impossible, because the other end is closed."""
        left = text.encode(errors="backslashreplace")
        self.blocked_since_s = time.monotonic()
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # a process that shares the pipe has made it non-blocking
                    select.select([], [self._descriptor], [])
        except OSError:
            return False
        finally:
            self.blocked_since_s = None
        return True


class StreamOutput(Descriptor):
    """Lines for a file or a pipe. encode: a line without its end."""

    def __init__(self, descriptor: int, encode: Callable[[LogLine], str]) -> None:
        super().__init__(descriptor)
        self._encode = encode
        self._last_line_s = time.monotonic()
        self.status: Status = no_status

    def write(self, line: LogLine) -> bool:
        self._last_line_s = time.monotonic()
        return self.write_all(self._encode(line) + "\n")

    def refresh(self) -> float | None:
        rows = self.status()
        if not rows:
            return None if self.status is no_status else MAX_SILENCE_S
        longest = max(rows, key=lambda row: (row.amount != "", row.seconds))
        silence_s = max(MAX_SILENCE_S, _SHARE_OF_PHASE * longest.seconds)
        seconds_left = self._last_line_s + silence_s - time.monotonic()
        if seconds_left > 0:
            return seconds_left
        self.write(longest.line())
        return silence_s

    def flush(self) -> None: ...
