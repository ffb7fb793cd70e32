"""How far a batch is, in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokasaurus.monitoring.progress import Speed, make_display, show_rate, show_time, show_tokens


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
    """Output tokens; tokens of running lines count if the server tells them."""
    num_expected: int | None = None
    """What `num_generated` is expected to be at the end; None if the server does not say."""
    tells_progress: bool = False
    """Whether the server tells the tokens of lines that run: our server does."""
    problem: str = ""
    """Why the batch cannot go on now, as our server tells it; "" if it can."""

    @property
    def num_done(self) -> int:
        """Lines that have a result; failed ones do."""
        return self.num_completed + self.num_failed


def seconds_left(batch: BatchView, speed: Speed) -> float | None:
    """None until there is a basis: the server's expectation, or, of a server that tells none, a line that has been seen
    to finish."""
    if batch.tells_progress:
        if batch.num_expected is None:
            return None
        per_s, num_left = speed.tokens_per_s(), batch.num_expected - batch.num_generated
    else:
        per_s, num_left = speed.items_per_s(), batch.num_lines - batch.num_done
    return max(0, num_left) / per_s if per_s else None


def describe(batch: BatchView, speed: Speed) -> str:
    """`120 of 2,000 lines done, 3 failed, 9,600 of 160,000 tokens, 812.4 tokens/s, 3 min 5 s left`; failed lines are
    done, too. Tokens are done of expected. What is not known yet is –. If the batch cannot go on, why: `120 of 2,000
    lines done, 3 failed; waits: no space is left …`"""
    if batch.status == "validating":
        return "the input is being validated" + (f"; waits: {batch.problem}" if batch.problem else "")
    if batch.num_lines == 0:  # a server that does not count them at once, or a batch without any
        return f"the batch is {batch.status}"
    text = f"{batch.num_done:,} of {batch.num_lines:,} lines done, {batch.num_failed:,} failed"
    if batch.problem:
        return f"{text}; waits: {batch.problem}"
    if batch.status != "in_progress":
        return f"{text}, {batch.status}"
    text = f"{text}, {show_tokens(batch.num_generated, batch.num_expected)}"
    return f"{text}, {show_rate(speed.tokens_per_s())} tokens/s, {show_time(seconds_left(batch, speed))} left"


class Progress:
    """What the user sees of a run."""

    def __init__(self) -> None:
        self._display = make_display()
        self._speed = Speed()

    def note(self, line: str) -> None:
        self._display.note(line)

    def update(self, batch: BatchView) -> None:
        self._speed.add(time.monotonic(), batch.num_done, batch.num_generated)
        self._display.show(describe(batch, self._speed), batch.num_done, batch.num_lines or None)

    def close(self) -> None:
        self._display.close()
