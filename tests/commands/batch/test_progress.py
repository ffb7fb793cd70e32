"""What the user sees of a batch that runs."""

from dataclasses import replace
from typing import Any

import pytest

from tokasaurus.commands.batch.progress import BatchView, describe, find_left
from tokasaurus.messages.status import TimeLeft
from tokasaurus.monitoring.time_left import Done, Pace


def view(
    status: str = "in_progress", total: int = 2000, completed: int = 100, failed: int = 3, **fields: Any
) -> BatchView:
    fields = {"num_generated": 5000, **fields}
    return BatchView("batch_1", status, total, completed, failed, 5000, [], **fields)


def told(num_generated: int, num_expected: int | None, left: tuple[float, float] | None = None) -> BatchView:
    """Of a server that tells the tokens of lines that run, of which none has finished."""
    fields = {"num_generated": num_generated, "num_expected": num_expected, "tells_progress": True}
    return view(completed=0, failed=0, time_left=None if left is None else TimeLeft(*left), **fields)


def middle_left(batch: BatchView, pace: Pace) -> float:
    left = find_left(batch, pace)
    assert left is not None
    return left.middle_s


def test_a_line_that_takes_minutes_still_has_a_speed() -> None:
    pace = Pace()
    for now_s, lines in ((0, 0), (300, 1), (600, 2)):
        pace.note(Done(now_s, 100 * lines, lines))
    assert middle_left(view(total=113), pace) == pytest.approx(3000)


def test_nothing_is_promised_before_a_line_has_finished() -> None:
    pace = Pace()
    lines = "0 of 2,000 lines done, 0 failed"
    assert describe(view(completed=0, failed=0), pace) == f"{lines}, 5,000 tokens, – tokens/s, – left"
    assert describe(told(0, 4000), pace) == f"{lines}, 0 of 4,000 tokens, – tokens/s, – left"
    pace.note(Done(0.0, 0, 0))
    pace.note(Done(1.0, 0, 0))
    assert find_left(view(completed=0, failed=0), pace) is None
    assert find_left(told(0, 4000), pace) is None


def test_tokens_of_lines_that_run_count_and_the_time_is_the_servers() -> None:
    pace = Pace()
    pace.note(Done(0.0, 0, 0))
    pace.note(Done(10.0, 1000, 0))
    lines = "0 of 2,000 lines done, 0 failed"
    tokens = f"{lines}, 1,000 of 8,000 tokens, 100.0 tokens/s"
    assert describe(told(1000, 8000, (121, 240)), pace) == f"{tokens}, 2–4 min left"
    assert describe(told(1000, 8000, (65, 75)), pace) == f"{tokens}, 1 min 10 s left"
    assert describe(told(1000, None), pace) == f"{lines}, 1,000 tokens, 100.0 tokens/s, – left"
    assert "1,000 of 1,000 tokens" in describe(told(1000, 900), pace)


def test_descriptions() -> None:
    pace = Pace()
    pace.note(Done(0.0, 0, 3))
    pace.note(Done(10.0, 8000, 103))
    text = "103 of 2,000 lines done, 3 failed, 5,000 tokens, 800.0 tokens/s, 3–4 min left"
    assert describe(view(), pace) == text
    assert describe(view("validating", 0, 0, 0), pace) == "the input is being validated"
    assert describe(view("cancelling", 0, 0, 0), pace) == "the batch is cancelling"
    assert describe(view("in_progress", 0, 0, 0), pace) == "the batch is in_progress"
    assert describe(view("finalizing", 2000, 1997, 3), pace) == "2,000 of 2,000 lines done, 3 failed, finalizing"
    full = "no space is left on the device of data_dir"
    assert describe(replace(view(), problem=full), pace) == f"103 of 2,000 lines done, 3 failed; waits: {full}"
    validating = replace(view("validating", 0, 0, 0), problem=full)
    assert describe(validating, pace) == f"the input is being validated; waits: {full}"
