"""What the user sees of a batch that runs."""

import random
from typing import Any

import pytest

from tokasaurus.batch_command.progress import BatchView, Speed, describe, show_time


def view(
    status: str = "in_progress", total: int = 2000, completed: int = 100, failed: int = 3, **fields: Any
) -> BatchView:
    return BatchView("batch_1", status, total, completed, failed, 5000, [], False, "24h", **fields)


def told(num_generated: int, num_expected: int | None) -> BatchView:
    """Of a server that tells the tokens of lines that run, of which none has finished."""
    fields = {"num_generated": num_generated, "num_expected": num_expected, "tells_progress": True}
    return view(completed=0, failed=0, **fields)


@pytest.mark.parametrize("seed", range(5))
def test_speed_is_that_of_about_the_last_minute(seed: int) -> None:
    chance = random.Random(seed)
    speed, samples = Speed(), []
    now_s, lines, tokens = 0.0, 40, 9000  # from a former run: they count for nothing
    for _ in range(200):
        samples.append((now_s, lines, tokens))
        speed.add(now_s, lines, tokens)
        now_s += chance.uniform(0.1, 3)
        lines, tokens = lines + chance.randint(1, 9), tokens + chance.randint(10, 900)
    recent = [sample for sample in samples if samples[-1][0] - sample[0] <= 60]
    seconds = recent[-1][0] - recent[0][0]
    assert speed.tokens_per_s() == pytest.approx((recent[-1][2] - recent[0][2]) / seconds)
    left = speed.seconds_left(view(total=1103))
    assert left == pytest.approx(1000 * seconds / (recent[-1][1] - recent[0][1]))


def test_a_line_that_takes_minutes_still_has_a_speed() -> None:
    speed = Speed()
    for now_s, lines in ((0, 0), (300, 1), (600, 2)):
        speed.add(now_s, lines, 100 * lines)
    assert speed.seconds_left(view(total=113)) == pytest.approx(3000)


def test_nothing_is_promised_before_a_line_has_finished() -> None:
    speed = Speed()
    nothing_known = "0 of 2,000 lines done, 0 failed, – tokens/s, – left"
    assert describe(view(completed=0, failed=0), speed) == nothing_known
    assert describe(told(0, 4000), speed) == nothing_known
    speed.add(0.0, 0, 0)
    speed.add(1.0, 0, 0)
    assert speed.seconds_left(view(completed=0, failed=0)) is None
    assert speed.seconds_left(told(0, 4000)) is None


def test_tokens_of_lines_that_run_count_and_the_servers_expectation_gives_the_time() -> None:
    speed = Speed()
    speed.add(0.0, 0, 0)
    speed.add(10.0, 0, 1000)
    text = "0 of 2,000 lines done, 0 failed, 100.0 tokens/s, 1 min 10 s left"
    assert describe(told(1000, 8000), speed) == text
    assert describe(told(1000, None), speed) == "0 of 2,000 lines done, 0 failed, 100.0 tokens/s, – left"
    assert speed.seconds_left(told(1000, 900)) == 0, "more than was expected"


def test_tokens_that_a_dead_engine_generates_again_do_not_count_twice() -> None:
    speed = Speed()
    for second, num_tokens in enumerate((0, 100, 200, 0, 100, 200, 300, 400)):
        speed.add(second, 0, num_tokens)
    assert speed.tokens_per_s() == pytest.approx(400 / 7)


def test_descriptions() -> None:
    speed = Speed()
    speed.add(0.0, 3, 0)
    speed.add(10.0, 103, 8000)
    text = "103 of 2,000 lines done, 3 failed, 800.0 tokens/s, 3 min 10 s left"
    assert describe(view(), speed) == text
    assert describe(view("validating", 0, 0, 0), speed) == "the input is being validated"
    assert describe(view("cancelling", 0, 0, 0), speed) == "the batch is cancelling"
    assert describe(view("in_progress", 0, 0, 0), speed) == "the batch is in_progress"
    assert describe(view("finalizing", 2000, 1997, 3), speed) == "2,000 of 2,000 lines done, 3 failed, finalizing"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (130, "2 min 10 s"), (3600, "1 h 0 min"), (90_061, "25 h 1 min")],
)
def test_times(seconds: float, text: str) -> None:
    assert show_time(seconds) == text
