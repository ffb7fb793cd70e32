"""What the user sees of a batch that runs."""

from dataclasses import replace
from typing import Any

import pytest

from tokasaurus.batch_command.progress import BatchView, describe, seconds_left
from tokasaurus.monitoring.progress import Speed


def view(
    status: str = "in_progress", total: int = 2000, completed: int = 100, failed: int = 3, **fields: Any
) -> BatchView:
    fields = {"num_generated": 5000, **fields}
    return BatchView("batch_1", status, total, completed, failed, 5000, [], False, "24h", **fields)


def told(num_generated: int, num_expected: int | None) -> BatchView:
    """Of a server that tells the tokens of lines that run, of which none has finished."""
    fields = {"num_generated": num_generated, "num_expected": num_expected, "tells_progress": True}
    return view(completed=0, failed=0, **fields)


def test_a_line_that_takes_minutes_still_has_a_speed() -> None:
    speed = Speed()
    for now_s, lines in ((0, 0), (300, 1), (600, 2)):
        speed.add(now_s, lines, 100 * lines)
    assert seconds_left(view(total=113), speed) == pytest.approx(3000)


def test_nothing_is_promised_before_a_line_has_finished() -> None:
    speed = Speed()
    lines = "0 of 2,000 lines done, 0 failed"
    assert describe(view(completed=0, failed=0), speed) == f"{lines}, 5,000 tokens, – tokens/s, – left"
    assert describe(told(0, 4000), speed) == f"{lines}, 0 of 4,000 tokens, – tokens/s, – left"
    speed.add(0.0, 0, 0)
    speed.add(1.0, 0, 0)
    assert seconds_left(view(completed=0, failed=0), speed) is None
    assert seconds_left(told(0, 4000), speed) is None


def test_tokens_of_lines_that_run_count_and_the_servers_expectation_gives_the_time() -> None:
    speed = Speed()
    speed.add(0.0, 0, 0)
    speed.add(10.0, 0, 1000)
    lines = "0 of 2,000 lines done, 0 failed"
    assert describe(told(1000, 8000), speed) == f"{lines}, 1,000 of 8,000 tokens, 100.0 tokens/s, 1 min 10 s left"
    assert describe(told(1000, None), speed) == f"{lines}, 1,000 tokens, 100.0 tokens/s, – left"
    assert seconds_left(told(1000, 900), speed) == 0, "more than was expected"
    assert "1,000 of 1,000 tokens" in describe(told(1000, 900), speed)


def test_descriptions() -> None:
    speed = Speed()
    speed.add(0.0, 3, 0)
    speed.add(10.0, 103, 8000)
    text = "103 of 2,000 lines done, 3 failed, 5,000 tokens, 800.0 tokens/s, 3 min 10 s left"
    assert describe(view(), speed) == text
    assert describe(view("validating", 0, 0, 0), speed) == "the input is being validated"
    assert describe(view("cancelling", 0, 0, 0), speed) == "the batch is cancelling"
    assert describe(view("in_progress", 0, 0, 0), speed) == "the batch is in_progress"
    assert describe(view("finalizing", 2000, 1997, 3), speed) == "2,000 of 2,000 lines done, 3 failed, finalizing"
    full = "no space is left on the device of data_dir"
    assert describe(replace(view(), problem=full), speed) == f"103 of 2,000 lines done, 3 failed; waits: {full}"
    validating = replace(view("validating", 0, 0, 0), problem=full)
    assert describe(validating, speed) == f"the input is being validated; waits: {full}"
