"""Code that runs too long is ended; other code is not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokasaurus.text.time_limit import TimeLimit, TimeLimitExceeded


def loop() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:
            pytest.fail("an ordinary handler caught the end")


def work(seconds: float) -> float:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass
    return seconds


def test_a_loop_is_ended_and_the_thread_can_go_on() -> None:
    limit = TimeLimit(0.2)
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(TimeLimitExceeded):
            limit.run(loop)
        assert 0.2 <= time.monotonic() - started < 30
        assert limit.run(lambda: work(0.0)) == 0.0


def test_only_the_thread_that_runs_too_long_is_ended() -> None:
    limit = TimeLimit(1.0)

    def run_in_thread(index: int) -> float | str:
        try:
            return limit.run(loop if index % 4 == 0 else lambda: work(0.05)) or 0
        except TimeLimitExceeded:
            return "ended"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run_in_thread, range(16)))
    assert results == ["ended", 0.05, 0.05, 0.05] * 4


def test_no_exception_arrives_after_the_work() -> None:
    """The work ends before, at about, or after the time of the limit: it is ended or not, but nothing after it is."""
    limit = TimeLimit(0.03)
    outcomes = set()
    for index in range(45):
        try:
            outcomes.add(limit.run(lambda seconds=0.01 + index % 15 * 0.005: bool(work(seconds))))
        except TimeLimitExceeded:
            outcomes.add(False)
        work(0.001)
    assert outcomes == {True, False}
    assert sum(thread.name == "time limit" for thread in threading.enumerate()) >= 1
