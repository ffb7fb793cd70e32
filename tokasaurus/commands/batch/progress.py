"""How far a batch is, in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokasaurus.messages.status import StepCost, TimeLeft
from tokasaurus.monitoring.progress import make_display, show_left, show_rate, show_tokens
from tokasaurus.monitoring.time_left import Done, Pace, Work, time_left


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
    result_file_ids: Sequence[str] = ()
    """Ids of the output file and the error file, if they exist."""
    model: str = ""
    """The batch's; "" if the server does not say."""
    num_generated: int = 0
    """Output tokens; tokens of running lines count if the server tells them."""
    num_expected: int | None = None
    """What `num_generated` is expected to be at the end; None if the server does not say."""
    tells_progress: bool = False
    """Whether the server tells the tokens of lines that run, and the time left: our server does."""
    time_left: TimeLeft | None = None
    problem: str = ""
    """Why the batch cannot go on now, as our server tells it; "" if it can."""

    @property
    def num_done(self) -> int:
        """Lines that have a result; failed ones do."""
        return self.num_completed + self.num_failed


def find_left(batch: BatchView, pace: Pace) -> TimeLeft | None:
    """What the server tells; of a server that tells nothing, by the lines that have been seen to finish. None until
    there is a basis. pace: has a step for each line."""
    if batch.tells_progress:
        return batch.time_left
    return time_left(Work([batch.num_lines - batch.num_done]), pace, StepCost(per_step=1.0, per_row=0.0))


def describe(batch: BatchView, pace: Pace) -> str:
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
    return f"{text}, {show_rate(pace.tokens_per_s())} tokens/s, {show_left(find_left(batch, pace))} left"


class Progress:
    """What the user sees of a run."""

    def __init__(self) -> None:
        self._display = make_display()
        self._pace = Pace()

    def note(self, line: str) -> None:
        self._display.note(line)

    def update(self, batch: BatchView) -> None:
        self._pace.note(Done(time.monotonic(), batch.num_generated, batch.num_done))
        self._display.show(describe(batch, self._pace), batch.num_done, batch.num_lines or None)

    def close(self) -> None:
        self._display.close()
