"""How far a batch is: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from tokasaurus.batch_command.api import BatchView

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 10.0
_WINDOW_S = 60.0


class Speed:
    """Lines and tokens per second in the last minute. Times are seconds by any clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()
        """(time, lines done, output tokens)."""

    def add(self, now_s: float, num_done: int, num_tokens: int) -> None:
        self._samples.append((now_s, num_done, num_tokens))
        while now_s - self._samples[0][0] > _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()

    def tokens_per_s(self) -> float:
        return self._per_second(2)

    def seconds_left(self, num_left: int) -> float | None:
        """None while no line has been seen to finish."""
        lines_per_s = self._per_second(1)
        return num_left / lines_per_s if lines_per_s > 0 else None

    def _per_second(self, index: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        return (last[index] - first[index]) / seconds if seconds > 0 else 0.0


def describe(batch: BatchView, speed: Speed) -> str:
    """`120 of 2,000 lines done, 3 failed, 812.4 tokens/s, 2 min 10 s left`; failed lines are done, too."""
    if batch.status == "validating":
        return "the input is being validated"
    if batch.num_lines == 0:  # a server that does not count them at once, or a batch without any
        return f"the batch is {batch.status}"
    num_done = batch.num_completed + batch.num_failed
    text = f"{num_done:,} of {batch.num_lines:,} lines done, {batch.num_failed:,} failed"
    if batch.status != "in_progress":
        return f"{text}, {batch.status}"
    text += f", {speed.tokens_per_s():,.1f} tokens/s"
    seconds = speed.seconds_left(batch.num_lines - num_done)
    return text if seconds is None else f"{text}, {show_time(seconds)} left"


def show_time(seconds: float) -> str:
    """The time in its two largest units."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


class Progress(Protocol):
    """What the user sees of a run."""

    def note(self, line: str) -> None: ...

    def update(self, batch: BatchView) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """Lines on stderr."""

    def __init__(self) -> None:
        self._speed = Speed()
        self._next_line_s = time.monotonic()

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def update(self, batch: BatchView) -> None:
        now_s = time.monotonic()
        self._speed.add(now_s, batch.num_completed + batch.num_failed, batch.output_tokens)
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + SECONDS_BETWEEN_LINES
            self.note(describe(batch, self._speed))

    def close(self) -> None: ...


class BarProgress:
    """A bar on the terminal of stderr, below the lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True, highlight=False, markup=False)
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
        self._speed = Speed()
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)

    def update(self, batch: BatchView) -> None:
        num_done = batch.num_completed + batch.num_failed
        self._speed.add(time.monotonic(), num_done, batch.output_tokens)
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        total = batch.num_lines or None
        self._bar.update(self._task, completed=num_done, total=total, description=describe(batch, self._speed))

    def close(self) -> None:
        self._bar.stop()


def make_progress() -> Progress:
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
