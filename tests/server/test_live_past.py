"""The server's own past, over a clock of the test's: bounded in time and memory, whatever the clock does."""

import random
from typing import Any, cast

import orjson
import pytest

from tokasaurus.server.live_past import KEPT_SECONDS, SECONDS_BETWEEN, LivePast
from tokasaurus.server.protocol.live import LiveMoment


def moment(time: float) -> LiveMoment:
    return cast(LiveMoment, {"time": time, "requests": {"open": 1}, "replicas": [{"index": 0, "state": "up"}]})


def told(past: LivePast, now: float) -> list[float]:
    event = orjson.loads(past.added_to(orjson.dumps({"format": 1, "time": now, "jobs": []}), now))
    assert (event["format"], event["time"], event["jobs"]) == (1, now, [])
    return [one["time"] for one in event["past"]]


@pytest.mark.parametrize("seed", range(5))
def test_the_last_15_minutes_are_told(seed: int) -> None:
    """Two hours, with times in which the server slept or was too busy, and a clock that is set back."""
    rng = random.Random(seed)
    past, now, kept = LivePast(), 1_764_331_200.0, list[float]()
    for _ in range(1500):
        now += rng.choice((SECONDS_BETWEEN,) * 200 + (SECONDS_BETWEEN + 0.3, 40.0, 1000.0, -30.0))
        kept = [time for time in kept if time < now] if not kept or now > kept[-1] else []
        kept.append(now)
        past.add(moment(now))
        if rng.random() < 0.1:
            later = now + rng.uniform(0.01, SECONDS_BETWEEN)
            assert told(past, later) == [time for time in kept[-180:] if later - KEPT_SECONDS <= time < later]
    assert len(past._moments) <= KEPT_SECONDS / SECONDS_BETWEEN


def test_an_event_before_the_first_moment_has_no_past() -> None:
    assert told(LivePast(), 5.0) == []


def test_half_a_kilobyte_is_kept_of_a_replica() -> None:
    """Large numbers in all fields."""
    names = ("prompt", "generated", "cached", "computed", "shared", "recomputed")
    replica: dict[str, Any] = {"index": 0, "state": "starting", "restarts": 9, "queue_depth": 16}
    replica |= dict.fromkeys(("running", "background", "waiting"), 99_999)
    replica["tokens"] = dict.fromkeys(names, 10**12)
    replica["blocks"] = dict.fromkeys(("total", "used", "cached", "free"), 10**7)
    replica["events"] = dict.fromkeys(("preempted", "evicted"), 10**6)
    past = LivePast()
    requests = dict.fromkeys(("open", "answered", "aborted", "failed"), 10**9)
    for number in range(1000):
        one = {"time": 1_764_331_200.123 + 5 * number, "requests": requests, "replicas": [replica]}
        past.add(cast(LiveMoment, one))
    assert sum(len(content) for _, content in past._moments) < 180 * 600
