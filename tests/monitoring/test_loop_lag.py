"""The lag of a real event loop that is blocked on purpose."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tokasaurus.monitoring import metrics
from tokasaurus.monitoring.metrics import LoopLag


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


def test_a_blocked_event_loop_is_a_stall_until_the_window_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAG_WINDOW_S", 2.0)

    async def run() -> None:
        lag = LoopLag()
        assert lag.largest_s() == 0
        with lag.measuring():
            await asyncio.sleep(0.2)
            before = lag.num_stalls
            time.sleep(1.2)  # noqa: ASYNC251
            await until(lambda: lag.num_stalls > before)
            assert 1.0 < lag.largest_s() < 20
            # A machine under load may have lags of its own, and stop for a second now and then.
            await until(lambda: lag.largest_s() < 1.0)

    asyncio.run(run())


def test_the_largest_lag_of_the_window_is_that_of_a_plain_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAG_WINDOW_S", 5.0)
    lag = LoopLag()
    lags = [0.3, 0.1, 0.2, 0.0, 0.25, 0.1, 0.0, 0.0, 0.05, 0.04, 0.0, 0.0]
    for second, value in enumerate(lags):
        monkeypatch.setattr(metrics.time, "monotonic", lambda now=second: float(now))
        lag._add(float(second), value)
        assert lag.largest_s() == max(lags[max(0, second - 5) : second + 1])
    assert lag.num_stalls == 1
