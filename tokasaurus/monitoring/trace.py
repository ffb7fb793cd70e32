"""Traces: what each process of the engine did when, in a file that Perfetto and chrome://tracing open.

Source of the file's format: "Trace Event Format" (Google). Every process adds its events to the file in one write, so
the file is an array whose end is missing while `trace_file` is open; viewers open it before that, too.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokasaurus.messages.status import UserError
from tokasaurus.workers import num_replicas

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

_NO_SPAN = nullcontext()
_LANES = ("host", "device")
_TRANSFER = "transfer"
_BEGIN, _END = "b", "e"

_SHORTEST_PART_S = 5e-6

Event = dict[str, Any]


class Trace:
    """Events of one process during a range of steps. All times are seconds of time.perf_counter(), which is one clock
    for all processes of a machine.

    Outside these steps, and where nothing is traced, a call costs some 0.1 microseconds.
    """

    def __init__(
        self, path: Path | None, first_step: int, num_steps: int, replica: int, process: str, row: int
    ) -> None:
        """path: None to trace nothing. process: its name for the user. row: its position in the viewer."""
        self.is_on = False
        self.step_id = -1
        """The latest step; set by `cover`."""
        self._path = path
        self._first = first_step
        self._end = 0 if path is None else first_step + num_steps
        self._replica = replica
        self._pid = os.getpid()
        self._events: list[Event] = [
            self._described("process_name", 0, name=process),
            self._described("process_sort_index", 0, sort_index=row),
            *(self._described("thread_name", lane, name=name) for lane, name in enumerate(_LANES)),
        ]

    @classmethod
    def of(cls, config: ServerConfig, process: str, replica: int, row: int) -> Trace:
        """The trace that the flags ask for. row: index among the replica's processes; the manager is 0."""
        path = None if config.trace is None else Path(config.trace)
        name = process if num_replicas(config) == 1 else f"replica {replica}: {process}"
        num_rows = 1 + config.pp_size * config.tp_size
        return cls(path, config.trace_first_step, config.trace_steps, replica, name, replica * num_rows + row)

    def cover(self, oldest: int, newest: int) -> None:
        """Set the range of steps at work; older steps are done. Writes the file after the last step to trace."""
        self.step_id = newest
        self.is_on = oldest < self._end and newest >= self._first
        if oldest >= self._end > 0:
            self.write()

    def pause(self) -> None:
        """Trace nothing until the next `cover`, so that an idle process does not fill its memory with empty events."""
        self.is_on = False

    def add(self, name: str, start_s: float, end_s: float, lane: str = "host", **details: object) -> None:
        """Record a span. Spans of one lane must be disjoint or nested."""
        if self.is_on:
            event = self._event("X", name, start_s, _LANES.index(lane), details)
            self._events.append(event | {"dur": _microseconds(end_s) - event["ts"]})

    def add_part(self, name: str, start_s: float, end_s: float) -> None:
        """`add`, unless the span is too short to be visible."""
        if end_s - start_s >= _SHORTEST_PART_S:
            self.add(name, start_s, end_s)

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """`add` for the body of a with statement."""
        return self._span(name, details) if self.is_on else _NO_SPAN

    @contextmanager
    def _span(self, name: str, details: Event) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.add(name, start_s, time.perf_counter(), **details)

    def begin_transfer(self, name: str, sender: int) -> None:
        """Record the start of a transfer of this step from rank `sender`."""
        self._transfer(_BEGIN, name, sender, self.step_id)

    def end_transfer(self, name: str, sender: int, step_id: int) -> None:
        """Record the end of the transfer that rank `sender` began in that step."""
        self._transfer(_END, name, sender, step_id)

    def _transfer(self, phase: str, name: str, sender: int, step_id: int) -> None:
        if self.is_on:
            event = self._event(phase, name, time.perf_counter(), 0, {})
            key = f"replica {self._replica}, rank {sender}, step {step_id}"
            self._events.append(event | {"cat": _TRANSFER, "id": f"{name}: {key}"})

    def _event(self, phase: str, name: str, time_s: float, lane: int, details: Event) -> Event:
        at = {"ph": phase, "name": name, "pid": self._pid, "tid": lane, "ts": _microseconds(time_s)}
        return at | {"args": {"step": self.step_id, **details}}

    def _described(self, what: str, lane: int, **details: object) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": lane, "args": details}

    def write(self) -> None:
        """Add all events to the file. The process traces nothing afterwards."""
        self.is_on, self._end = False, 0
        if self._path is None:
            return
        lines = "".join(f"{json.dumps(event)},\n" for event in self._events).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(lines)
        except OSError as error:
            logger.warning("trace=%s: %s", self._path, error.strerror)
        self._path, self._events = None, []


def _microseconds(time_s: float) -> int:
    """Rounded to integers: with fractions, a viewer's rounding could make an inner span end after the outer one."""
    return round(time_s * 1e6)


NO_TRACE = Trace(None, 0, 0, replica=0, process="", row=0)


@contextmanager
def trace_file(name: str | None) -> Iterator[None]:
    """Create the file, and complete it on exit, after all processes have ended. None: no file.

    Raises UserError if it cannot be created.
    """
    if name is None:
        yield
        return
    path = Path(name)
    try:
        path.write_text("[\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"trace={name}: {error.strerror}") from error
    try:
        yield
    finally:
        _make_whole(path)


def _make_whole(path: Path) -> None:
    """Sort the events by time, and drop transfers with only one recorded end.

    A file that cannot be read or written is left unchanged, with a warning.
    """
    try:
        lines = path.read_text(encoding="utf-8").removeprefix("[\n").removesuffix(",\n")
        events: list[Event] = json.loads(f"[{lines}]")
        phases = {(event["ph"], event.get("id")) for event in events}
        whole = [event for event in events if event["ph"] not in _BEGIN + _END or _both_ends(event) <= phases]
        whole.sort(key=lambda event: event.get("ts", 0.0))
        path.write_text("[\n" + ",\n".join(json.dumps(event) for event in whole) + "\n]\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        logger.warning("trace=%s: %s", path, error)


def _both_ends(event: Event) -> set[tuple[object, object]]:
    return {(_BEGIN, event["id"]), (_END, event["id"])}
