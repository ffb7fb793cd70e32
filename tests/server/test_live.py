"""GET /live on a real server: when samples are taken, what events say, and how streams end."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.helpers.bodies_and_errors import COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.live import BlockUse, KVForecastPoints, LiveSample, NextSequence, TakeSample
from tokasaurus.messages.status import EngineStats
from tokasaurus.server.served_model import ServedModel

STATS = EngineStats(5, 2, 30, 64, 100, 200, 3, 7, total_forward_seconds=10.0, num_running_background=1)
SAMPLE = LiveSample(
    stats=STATS,
    step=41,
    num_steps=9,
    round_seconds=0.0125,
    num_microbatches=1,
    num_slots=16,
    num_prefilling=1,
    blocks=BlockUse(own=20, shared=10, cached=14, free=20),
    num_admitted=4,
    num_finished=3,
    num_preempted=2,
    num_evicted_blocks=1,
    forecast=KVForecastPoints(44, [0, 10, 11], [30, 33, 0], 33, 64),
    next=NextSequence(11, 12, 90, 3.25, "blocks"),
    oldest_wait_s=3.5,
    lengths=[(10, 12), (5, 5)],
    eta_s=4.04,
    manager_seconds={"results": 0.02},
    busy_seconds=0.9,
    idle_seconds=0.05,
    phase_seconds=(0.5, 0.1, 0.0, 0.2, 0.1),
)


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            assert name == "data"
            yield json.loads(value)


@contextmanager
def watching(server: LiveServer, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with server.http.stream("GET", "/live", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        yield events_of(response)


@pytest.fixture
def sampled(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(sample=lambda _: SAMPLE), page_size=16) as server:
        yield server


def test_an_event_has_the_figures_of_a_sample_under_their_documented_names(sampled: LiveServer) -> None:
    sampled.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS))
    with watching(sampled) as events:
        event = next(events)
    assert event["format"] == 1
    assert abs(event["time"] - time.time()) < 60
    assert (
        event["server"].items()
        >= {"model": "org/small", "dp_size": 1, "draining": False, "price_per_hour": None}.items()
    )
    assert event["requests"] == {"open": 0, "answered": 1, "aborted": 0, "failed": 0}
    assert event["jobs"] == []
    assert event["replicas"] == [
        {
            **{"index": 0, "state": "up", "restarts": 0, "step": 41, "steps": 9, "step_seconds": 0.0125},
            **{"microbatches": 1, "running": 5, "prefilling": 1, "background": 1, "waiting": 2, "slots": 16},
            "queue_depth": 3,
            "tokens": {"prompt": 100, "generated": 200, "cached": 7, "computed": 0, "shared": 0, "recomputed": 0},
            "blocks": {"total": 64, "own": 20, "shared": 10, "cached": 14, "free": 20},
            "events": {"admitted": 4, "finished": 3, "preempted": 2, "evicted": 1},
            "forecast": {"step": 44, "steps": [0, 10, 11], "blocks": [30, 33, 0], "peak": 33, "limit": 64},
            "next": {
                **{"fits_in_steps": 11, "blocks": 12, "prompt_tokens": 90, "wait_seconds": 3.25},
                "blocked_by": "blocks",
            },
            "oldest_wait_seconds": 3.5,
            "lengths": [[10, 12], [5, 5]],
            "eta_seconds": 4.0,
            "parts": {
                "manager": {"results": 0.02},
                "device": {"busy": 0.9, "idle": 0.05},
                "phases": {"gemm": 0.5, "heads": 0.1, "prefix_attention": 0.0, "attention": 0.2, "sampling": 0.1},
            },
        }
    ]


def test_three_listeners_share_one_sample_a_second_and_without_any_none_is_taken(sampled: LiveServer) -> None:
    engine = sampled.engine
    time.sleep(0.3)
    assert engine.asked_samples == []
    with watching(sampled) as first, watching(sampled) as second, watching(sampled) as third:
        next(first)
        started, before = time.monotonic(), len(engine.asked_samples)
        times = [[next(events)["time"] for _ in range(3)] for events in (first, second, third)]
        seconds, num_asked = time.monotonic() - started, len(engine.asked_samples) - before
    assert num_asked <= seconds + 2
    assert len({when for whens in times for when in whens}) <= num_asked + 2
    assert [asked.begins for asked in engine.asked_samples] == [True] + [False] * (len(engine.asked_samples) - 1)
    time.sleep(1.3)
    num_asked = len(engine.asked_samples)
    time.sleep(1.5)
    assert len(engine.asked_samples) == num_asked, "nobody listens"
    with watching(sampled) as events:
        next(events)
    assert engine.asked_samples[-1] == TakeSample(begins=True)
