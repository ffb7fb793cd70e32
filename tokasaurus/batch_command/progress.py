"""How far a batch is: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 10.0
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchView:
    """How far a batch is."""

    id: str
    status: str
    num_lines: int
    """0 until they are counted."""
    num_completed: int
    num_failed: int
    output_tokens: int
    errors: list[dict[str, Any]]
    """Errors of the input file: code, message, line (from 1), param."""
    has_results: bool
    completion_window: str | None
    """None if the server does not say."""
    result_file_ids: Sequence[str] = ()
    """On a server: ids of the output file and the error file, if they exist."""
    num_generated: int = 0
    """Output tokens, with those of lines that run if the server tells them."""
    num_expected: int | None = None
    """What `num_generated` is expected to be at the end; None if the server does not say."""
    tells_progress: bool = False
    """Whether the server tells the tokens of lines that run: our server does."""

    @property
    def num_done(self) -> int:
        """Lines that have a result; failed ones do."""
        return self.num_completed + self.num_failed


class Speed:
    """Lines and tokens per second in the last minute. Times are seconds by any clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()
        """(time, lines done, output tokens)."""

    def add(self, now_s: float, num_done: int, num_tokens: int) -> None:
        if self._samples:  # tokens of lines whose engine died are generated again
            num_tokens = max(num_tokens, self._samples[-1][2])
        self._samples.append((now_s, num_done, num_tokens))
        while now_s - self._samples[0][0] > _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()

    def tokens_per_s(self) -> float | None:
        """None until there is a basis."""
        return self._per_second(2)

    def seconds_left(self, batch: BatchView) -> float | None:
        """None until there is a basis: the server's expectation, or, of a server that tells none, a line that has been
        seen to finish."""
        if batch.tells_progress:
            if batch.num_expected is None:
                return None
            per_s, num_left = self._per_second(2), batch.num_expected - batch.num_generated
        else:
            per_s, num_left = self._per_second(1), batch.num_lines - batch.num_done
        return max(0, num_left) / per_s if per_s else None

    def _per_second(self, index: int) -> float | None:
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        return (last[index] - first[index]) / seconds if seconds > 0 else None


def describe(batch: BatchView, speed: Speed) -> str:
    """`120 of 2,000 lines done, 3 failed, 812.4 tokens/s, 2 min 10 s left`; failed lines are done, too. What is not
    known yet is –."""
    if batch.status == "validating":
        return "the input is being validated"
    if batch.num_lines == 0:  # a server that does not count them at once, or a batch without any
        return f"the batch is {batch.status}"
    text = f"{batch.num_done:,} of {batch.num_lines:,} lines done, {batch.num_failed:,} failed"
    if batch.status != "in_progress":
        return f"{text}, {batch.status}"
    tokens_per_s, seconds = speed.tokens_per_s(), speed.seconds_left(batch)
    rate = "–" if tokens_per_s is None else f"{tokens_per_s:,.1f}"
    return f"{text}, {rate} tokens/s, {'–' if seconds is None else show_time(seconds)} left"


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
        self._speed.add(now_s, batch.num_done, batch.num_generated)
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
        self._speed.add(time.monotonic(), batch.num_done, batch.num_generated)
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        total = batch.num_lines or None
        self._bar.update(self._task, completed=batch.num_done, total=total, description=describe(batch, self._speed))

    def close(self) -> None:
        self._bar.stop()


def make_progress() -> Progress:
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
