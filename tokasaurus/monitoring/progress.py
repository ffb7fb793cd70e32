"""How far a long job is, shown to the user: a bar on a terminal, a line that changes in a notebook, else a line every
ten seconds."""

from __future__ import annotations

import html
import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tokasaurus.messages.status import TimeLeft

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_CHANGES = 0.2
"""Least time between two changes of a bar or a line."""
_RANGE_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def show_rate(per_s: float | None) -> str:
    """– for what is not known."""
    return "–" if per_s is None else f"{per_s:,.1f}"


def show_tokens(num_done: int, num_expected: float | None) -> str:
    """`9,600 of 160,000 tokens`; without the number of expected ones if that is not known."""
    expected = "" if num_expected is None else f" of {max(num_done, round(num_expected)):,}"
    return f"{num_done:,}{expected} tokens"


def show_time(seconds: float | None) -> str:
    """The time in its two largest units; – for what is not known."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def show_left(left: TimeLeft | None) -> str:
    """`3 min 5 s`, or `2–4 min` while it is not sure; – for what is not known."""
    if left is None:
        return "–"
    size, unit = next((one for one in _RANGE_UNITS if left.high_s >= 2 * one[0]), _RANGE_UNITS[-1])
    low, high = (int(end_s / size + 0.5) for end_s in left)  # as the page rounds
    return show_time(left.middle_s) if left.is_sure or low == high else f"{low}–{high} {unit}"


class Display:
    """What the user sees of a job: here nothing."""

    _seconds_between = _SECONDS_BETWEEN_CHANGES
    _next_s = math.inf

    def is_due(self) -> bool:
        """Whether `show` would show something now."""
        return time.monotonic() >= self._next_s

    def note(self, line: str) -> None:
        """A line that stays."""

    def show(self, text: str, num_done: int, total: int | None, is_last: bool = False) -> None:
        """How far the job is, in place of what was shown before. total: None if it is not known. is_last: shown at any
        time."""

    def close(self) -> None: ...

    def _note_shown(self) -> None:
        self._next_s = time.monotonic() + self._seconds_between


class LineDisplay(Display):
    """Lines on stderr."""

    _seconds_between = SECONDS_BETWEEN_LINES
    _next_s = -math.inf

    def note(self, line: str) -> None:
        # A log file on a full disk, or a pipe that nobody reads any more, must not end the job.
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def show(self, text: str, _num_done: int, _total: int | None, is_last: bool = False) -> None:
        if is_last or self.is_due():
            self._note_shown()
            self.note(text)


class BarDisplay(Display):
    """A bar on the terminal of stderr, below the lines."""

    _next_s = -math.inf

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True, highlight=False, markup=False)
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)

    def show(self, text: str, num_done: int, total: int | None, is_last: bool = False) -> None:
        del is_last
        self._note_shown()
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        self._bar.update(self._task, completed=num_done, total=total, description=text)

    def close(self) -> None:
        self._bar.stop()


class NotebookDisplay(Display):
    """A bar and a line below the cell, changed in place."""

    _next_s = -math.inf
    _handle: Any = None

    def note(self, line: str) -> None:
        print(line, flush=True)

    def show(self, text: str, num_done: int, total: int | None, is_last: bool = False) -> None:
        del is_last
        import IPython.display

        self._note_shown()
        value = f' value="{num_done}" max="{max(1, total)}"' if total is not None else ""
        content = {"text/plain": text, "text/html": f"<progress{value}></progress> {html.escape(text)}"}
        if self._handle is None:
            show: Any = IPython.display.display  # IPython has no types
            self._handle = show(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def make_display() -> Display:
    if _is_notebook():
        return NotebookDisplay()
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook, which may be installed or not."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
