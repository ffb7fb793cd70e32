"""What a user reads while a `map` runs."""

import time

import pytest

from tokasaurus.library.bulk import Progress
from tokasaurus.library.counts import Counts
from tokasaurus.library.map.progress import MapProgress, describe, seconds_left
from tokasaurus.monitoring.progress import Speed


def speed_of(rows_per_s: int, tokens_per_s: int) -> Speed:
    speed = Speed()
    speed.add(0.0, 0, 0)
    speed.add(10.0, 10 * rows_per_s, 10 * tokens_per_s)
    return speed


def test_descriptions() -> None:
    counts = Counts(num_rows=500, num_skipped=20, num_finished=100, num_errors=3, output_tokens=8_000)
    speed = speed_of(10, 800)
    rows = "120 of 2,000 rows done, 3 errors"
    assert describe(counts, 50, None, 2_000, speed) == f"{rows}, 8,000 tokens, 800.0 tokens/s, 3 min 8 s left"
    assert describe(counts, 50, None, None, speed) == "120 rows done, 3 errors, 8,000 tokens, 800.0 tokens/s"
    assert describe(Counts(), 0, None, 10, Speed()) == "0 of 10 rows done, 0 errors, 0 tokens, – tokens/s, – left"
    assert "1 error," in describe(Counts(num_errors=1), 0, None, 10, Speed())


def test_the_last_line_shows_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    counts = Counts(num_rows=3)
    with MapProgress(3, is_shown=True) as progress:
        progress.update(counts, 3, None)
        now_s = 2.0
        counts.num_finished, counts.output_tokens = 3, 90
        progress.update(counts, 0, None)
    assert capsys.readouterr().err.splitlines() == [
        "0 of 3 rows done, 0 errors, 0 tokens, – tokens/s, – left",
        "3 of 3 rows done, 0 errors, 90 tokens, 45.0 tokens/s",
    ]
    counts = Counts(num_rows=30, num_finished=10, output_tokens=600)
    with MapProgress(30, is_shown=True, began_s=-1.0) as progress:  # shown late
        progress.update(counts, 20, None)
    assert (
        capsys.readouterr().err.splitlines()[0] == "10 of 30 rows done, 0 errors, 600 tokens, 200.0 tokens/s, 6 s left"
    )
    with MapProgress(3, is_shown=True):
        pass  # an error before anything was shown
    assert capsys.readouterr().err == ""


def test_the_time_left_is_of_the_tokens_that_are_expected() -> None:
    told = Progress(num_requests=50, num_generated=1_000, num_expected=6_000)
    counts = Counts(num_skipped=20, num_finished=110, num_errors=10, output_tokens=8_000)
    # 50 rows in flight lack 5,000 tokens; 820 rows are not sent, of 80 tokens each
    left = seconds_left(counts, 50, told, 1_000, speed_of(1, 100))
    assert left == pytest.approx((5_000 + 820 * 80) / 100)
    # no row has an answer yet: those in flight are the basis
    left = seconds_left(Counts(), 50, told, 1_000, speed_of(0, 100))
    assert left == pytest.approx((5_000 + 950 * 120) / 100)
    # more has come than was expected, and the source has more rows than it said
    late = Progress(num_requests=5, num_generated=700, num_expected=600)
    assert seconds_left(Counts(num_finished=1_000, output_tokens=1), 5, late, 900, speed_of(1, 100)) == 0


def test_tokens_done_of_tokens_expected() -> None:
    told = Progress(num_requests=50, num_generated=1_000, num_expected=6_000)
    counts = Counts(num_skipped=20, num_finished=110, num_errors=10, output_tokens=8_000)
    # 8,000 are done, 6,000 are of rows in flight, and 820 rows are not sent, of 80 tokens each
    assert "10 errors, 9,000 of 79,600 tokens, 100.0 tokens/s, 11 min 46 s left" in describe(
        counts, 50, told, 1_000, speed_of(1, 100)
    )
    assert "9,000 tokens," in describe(counts, 50, told, None, speed_of(1, 100)), "how many rows come is not known"
    late = Progress(num_requests=870, num_generated=700, num_expected=600)
    assert "8,700 of 8,700 tokens" in describe(counts, 870, late, 1_000, speed_of(1, 100))


def test_without_an_expectation_the_time_left_is_of_the_rows() -> None:
    counts = Counts(num_finished=100, output_tokens=8_000)
    for told in (None, Progress(50, 1_000, None), Progress(0, 0, 0)):
        assert seconds_left(counts, 50, told, 1_000, speed_of(10, 800)) == pytest.approx(90)
        assert seconds_left(counts, 50, told, 1_000, speed_of(0, 0)) is None
