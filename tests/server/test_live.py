"""GET /live on a real server: when samples are taken, what events say, and how streams end."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
import pytest

from tests.helpers.flags import config_with
from tests.server.helpers.bodies_and_errors import COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.client_driver import run_with
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, start_again
from tests.server.helpers.live_sample import SAMPLE
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_ready
from tokasaurus.config import ServerConfig
from tokasaurus.messages.generation import EngineUpdate, GenerateRequest
from tokasaurus.messages.live import ClientCounts, LiveSample, LiveStage, TakeSample
from tokasaurus.server import live
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.jobs.open_bulk import OpenBulk, OpenBulks
from tokasaurus.server.live import LiveFeed
from tokasaurus.server.recording import opened_recording
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState

SAMPLE_SECONDS = 0.25
PAST_SECONDS = 0.1


@pytest.fixture(autouse=True)
def four_samples_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests would wait for most of their time otherwise."""
    monkeypatch.setattr(live, "SAMPLE_SECONDS", SAMPLE_SECONDS)
    monkeypatch.setattr(live, "MAX_SAMPLE_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(live, "SECONDS_BETWEEN", PAST_SECONDS)


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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
            "eta_range": [4.0, 4.0],
            "parts": {
                "manager": {"results": 0.02},
                "device": {"busy": 0.9, "idle": 0.05},
                "phases": {"gemm": 0.5, "heads": 0.1, "prefix_attention": 0.0, "attention": 0.2, "sampling": 0.1},
            },
            "oldest": [
                {
                    **{"id": "cmpl-1", "client": "alice", "state": "running", "samples": 4, "running": 3},
                    **{"prompt_tokens": 90, "generated_tokens": 1200, "max_tokens": 500},
                    **{"age_seconds": 12.25, "wait_seconds": 0.5},
                }
            ],
        }
    ]


def test_pipeline_stages_are_in_the_event(served_model: ServedModel) -> None:
    sample = replace(SAMPLE, stages=(LiveStage(0.625, 0.25, 2), LiveStage(0.5, 0.0, 1)))
    with live_server(served_model, FakeEngine(sample=lambda _: sample)) as server, watching(server) as events:
        (shown,) = next(events)["replicas"]
    assert shown["stages"] == [
        {"busy": 0.625, "waiting": 0.25, "microbatches": 2},
        {"busy": 0.5, "waiting": 0.0, "microbatches": 1},
    ]


def test_three_listeners_share_the_samples_and_without_any_none_is_taken(sampled: LiveServer) -> None:
    engine = sampled.engine
    time.sleep(2 * SAMPLE_SECONDS)
    assert engine.asked_samples == []
    with watching(sampled) as first, watching(sampled) as second, watching(sampled) as third:
        next(first)
        started, before = time.monotonic(), len(engine.asked_samples)
        times = [[next(events)["time"] for _ in range(3)] for events in (first, second, third)]
        seconds, num_asked = time.monotonic() - started, len(engine.asked_samples) - before
    assert num_asked <= seconds / SAMPLE_SECONDS + 2
    assert len({when for whens in times for when in whens}) <= num_asked + 2
    assert [asked.begins for asked in engine.asked_samples] == [True] + [False] * (len(engine.asked_samples) - 1)
    time.sleep(2 * SAMPLE_SECONDS)
    num_asked = len(engine.asked_samples)
    time.sleep(4 * SAMPLE_SECONDS)
    assert len(engine.asked_samples) == num_asked, "nobody listens"
    with watching(sampled) as events:
        next(events)
    assert engine.asked_samples[-1] == TakeSample(begins=True)


def test_who_comes_gets_the_past_in_the_first_event(sampled: LiveServer) -> None:
    """Without a listener, and without a question to the manager."""
    sampled.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS))
    stats = replace(sampled.engine.stats, num_running=5, num_kv_blocks_used=30, num_kv_blocks_cached=10)
    sampled.engine.updates.send(EngineUpdate([], replace(stats, total_preemptions=3, total_kv_blocks_evicted=8)))
    time.sleep(5 * PAST_SECONDS)
    sampled.engine.updates.send(EngineUpdate([], replace(stats, total_preemptions=4, total_kv_blocks_evicted=8)))
    time.sleep(3 * PAST_SECONDS)
    assert sampled.engine.asked_samples == []
    with watching(sampled) as first, watching(sampled) as second:
        events = [next(first), next(first)]
        others = [next(second), next(second)]
    for one, after in (events, others):
        times = [moment["time"] for moment in one["past"]]
        assert len(times) >= 8
        assert times == sorted({*times, one["time"]} - {one["time"]})
        assert "past" not in after
    moments = events[0]["past"]
    tokens = stats.total_prompt_tokens, stats.total_generation_tokens
    newest = {**moments[-1]["replicas"][0]}
    assert newest.pop("events").keys() == {"preempted", "evicted"}
    assert newest == {
        **{"index": 0, "state": "up", "restarts": 0, "running": 5, "background": 0, "waiting": 0, "queue_depth": 0},
        "tokens": {
            "prompt": tokens[0],
            "generated": tokens[1],
            "cached": 0,
            "computed": 0,
            "shared": 0,
            "recomputed": 0,
        },
        "blocks": {"total": 64, "used": 30, "cached": 10, "free": 24},
    }
    assert moments[-1]["requests"] == {"open": 0, "answered": 1, "aborted": 0, "failed": 0}
    told = [one["replicas"][0].get("events") for one in moments]
    sums = [sum(one[name] for one in told if one is not None) for name in ("preempted", "evicted")]
    assert sums == [4, 8]


def test_lengths_that_others_were_told_are_in_the_past(sampled: LiveServer) -> None:
    """A manager tells each once."""
    told = threading.Event()
    sampled.engine.sample = lambda _: replace(SAMPLE, lengths=[] if told.is_set() else SAMPLE.lengths)
    with watching(sampled) as events:
        assert next(events)["replicas"][0]["lengths"] == [[10, 12], [5, 5]]
        told.set()
        while next(events)["replicas"][0].get("lengths") != []:
            pass
        time.sleep(2 * PAST_SECONDS)
        with watching(sampled) as later:
            past = next(later)["past"]
    pairs = [pair for moment in past for pair in moment["replicas"][0].get("lengths", [])]
    assert pairs in [[[10, 12], [5, 5]] * number for number in (1, 2)]


def test_the_past_of_two_replicas_shows_that_one_died_and_came_back() -> None:
    engines = [FakeEngine(), FakeEngine()]

    async def use(client: EngineClient) -> None:
        state = SimpleNamespace(engine=client, model=SimpleNamespace(name="m"), config=config_with(dp_size=2))
        feed = LiveFeed(cast(ServerState, state), None, OpenBulks(), None)
        async with feed.running():
            for engine, running in zip(engines, (3, 7), strict=True):
                engine.updates.send(EngineUpdate([], replace(engine.stats, num_running=running, total_preemptions=9)))
            await asyncio.sleep(3 * PAST_SECONDS)
            engines[1].die()
            await asyncio.sleep(3 * PAST_SECONDS)
            engines.append(start_again(engines[1], 1))
            await asyncio.to_thread(wait_for, lambda: client.replicas[1].is_ready)
            engines[2].updates.send(EngineUpdate([], replace(engines[2].stats, num_running=1, total_preemptions=2)))
            await asyncio.sleep(4 * PAST_SECONDS)
            past = orjson.loads((await anext(feed.listen()))[6:])["past"]
        first, second = ([one["replicas"][index] for one in past] for index in (0, 1))
        known = [(one["state"], one["restarts"], one.get("running")) for one in second]
        order = [known[0], *(after for before, after in itertools.pairwise(known) if after != before)]
        assert [one for one in order if one[2] != 0] == [("up", 0, 7), ("down", 0, None), ("up", 1, 1)]
        assert "blocks" not in next(one for one in second if one["state"] == "down")
        assert sum(one["events"]["preempted"] for one in second if one["restarts"] == 1) == 2, "since the restart"
        assert {(one["state"], one["restarts"]) for one in first} == {("up", 0)}
        assert first[-1]["running"] == 3

    run_with([engines[0], engines[1]], use)
    engines[2].stop()


def test_the_last_event_says_why_the_server_ends(sampled: LiveServer) -> None:
    with watching(sampled) as events:
        assert next(events)["server"]["ended"] is None
        sampled.client.begin_drain("it was stopped")
        *_, last = events
    assert last["server"]["ended"] == "it was stopped"


def test_several_keys_are_counted_by_name(served_model: ServedModel, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"user-{number} key-{number}\n" for number in range(23)))
    clients = (ClientCounts("user-7", 3, 1_000), ClientCounts("batch:1", 2, 9), ClientCounts("user-22", 0, 1))
    engine = FakeEngine(sample=lambda _: replace(SAMPLE, clients=clients))
    with live_server(served_model, engine, start_engine=False, api_keys_file=str(keys)) as server:
        engine.start()
        server.http.headers["Authorization"] = "Bearer key-5"
        wait_until_ready(server.http)
        for number in (5, 5, 0):
            sent = {"Authorization": f"Bearer key-{number}"}
            assert server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS), headers=sent).status_code == 200
        with watching(server) as events:
            event = next(events)
    assert engine.asked_samples[0].counts_clients
    prompt, generated = (engine.stats.total_prompt_tokens // 3, engine.stats.total_generation_tokens // 3)
    told = [(one["name"], one["running"], one["waiting"], *one["tokens"].values()) for one in event["keys"]]
    assert told[:4] == [
        ("user-7", 3, 1_000, 0, 0),
        ("user-22", 0, 1, 0, 0),
        ("user-5", 0, 0, 2 * prompt, 2 * generated),
        ("user-0", 0, 0, prompt, generated),
    ]
    assert (len(told), told[-1]) == (21, (None, 2, 9, 0, 0)), "of the others, and of batches, one for all"


def test_a_single_key_is_not_counted(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(sample=lambda _: SAMPLE), api_key="s3cret") as server:
        with watching(server) as events:
            assert next(events)["keys"] == []
        assert not server.engine.asked_samples[0].counts_clients


def test_the_key_is_asked_for(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), api_key="s3cret") as server:
        refused = httpx.get(f"{server.url}/live", timeout=20)
        assert (refused.status_code, assert_openai_error(refused.content)["code"]) == (401, "invalid_api_key")
        with watching(server) as events:
            assert next(events)["replicas"][0]["state"] == "up"


def test_head_has_the_headers_and_ends(sampled: LiveServer) -> None:
    head = sampled.http.head("/live")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
    assert sampled.engine.asked_samples == []


def test_events_come_while_replicas_start_are_silent_or_have_died(served_model: ServedModel) -> None:
    engine = FakeEngine()
    with live_server(served_model, engine, start_engine=False) as server, watching(server) as events:
        event = next(events)
        assert event["replicas"] == [{"index": 0, "state": "starting", "restarts": 0}]
        assert event["server"]["page_size"] is None
        engine.start()
        while event["replicas"][0]["state"] == "starting":
            event = next(events)
        assert event["replicas"][0]["state"] == "up"
        assert event["replicas"][0]["running"] == 0
        assert "blocks" not in event["replicas"][0], "it was asked and did not answer"
        engine.wait_until(lambda engine: len(engine.asked_samples) > 0)
        next(events)
        next(events)
        assert len(engine.asked_samples) == 1, "not asked again before it answers"
        engine.die()
        while event["replicas"][0]["state"] == "up":
            event = next(events)
        assert event["replicas"] == [{"index": 0, "state": "down", "restarts": 0}]


def test_a_late_sample_is_in_a_later_event(served_model: ServedModel) -> None:
    def answer_late(asked: TakeSample) -> LiveSample:
        time.sleep(0 if asked.begins else 2 * SAMPLE_SECONDS)
        return SAMPLE

    with live_server(served_model, FakeEngine(sample=answer_late)) as server, watching(server) as events:
        has_steps = ["steps" in next(events)["replicas"][0] for _ in range(9)]
    assert has_steps[0]
    assert 1 < sum(has_steps[1:]) < 6, "not in every event, and not lost"


def test_a_sample_that_arrives_after_all_have_left_is_not_shown_to_those_who_come_later(
    served_model: ServedModel,
) -> None:
    engine = FakeEngine()

    def answer(_: TakeSample) -> LiveSample:
        if len(engine.asked_samples) == 1:
            time.sleep(3 * SAMPLE_SECONDS)
        return replace(SAMPLE, step=len(engine.asked_samples))

    engine.sample = answer
    with live_server(served_model, engine) as server:
        with watching(server) as events:
            assert "step" not in next(events)["replicas"][0]
        deadline = time.monotonic() + 30
        while server.client.replicas[0].sample is None:
            assert time.monotonic() < deadline, "the late sample has not arrived"
            time.sleep(0.02)
        with watching(server) as events:
            shown = [next(events)["replicas"][0].get("step") for _ in range(3)]
    assert 1 not in shown
    assert 2 in shown


def test_a_stopping_server_ends_the_streams(sampled: LiveServer) -> None:
    with watching(sampled) as events:
        next(events)
        sampled.client.begin_drain()
        started = time.monotonic()
        rest = list(events)
        assert time.monotonic() - started < 5
        assert len(rest) <= 1
    refused = sampled.http.get("/live")
    assert (refused.status_code, assert_openai_error(refused.content)["code"]) == (503, "server_stopping")


def test_a_server_that_drains_shows_what_is_left(sampled: LiveServer) -> None:
    sampled.engine.script = lambda *_: None
    with sampled.http.stream("GET", "/live") as response:
        events = events_of(response)
        with sampled.http.stream("POST", "/v1/bulk", content=line(0, "a", 3)):
            sampled.engine.wait_until(lambda engine: len(engine.requests) == 1)
            next(events)
            sampled.client.begin_drain()
            shown = [next(events) for _ in range(3)]
            assert shown[-1]["server"]["draining"]
            assert shown[-1]["requests"]["open"] == 1
        assert len(list(itertools.islice(events, 20))) < 20, "they end soon after the last request"


def test_requests_count_by_their_ends(sampled: LiveServer) -> None:
    sampled.engine.script = echo
    assert sampled.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 200
    sampled.engine.script = lambda *_: Reply([], error="x", error_code="numerical_error")
    assert sampled.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 500
    sampled.engine.script = lambda *_: None
    with pytest.raises(httpx.ReadTimeout):
        sampled.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS), timeout=0.5)
    sampled.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    with watching(sampled) as events:
        assert next(events)["requests"] == {"open": 0, "answered": 1, "aborted": 1, "failed": 1}


def line(number: int, prompt: str, max_tokens: int) -> bytes:
    body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens}
    return orjson.dumps({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}) + b"\n"


def job_of(events: Iterator[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any]:
    """The only job, once it has these values."""
    for event in itertools.islice(events, 100):
        if event["jobs"] and event["jobs"][0].items() >= wanted.items():
            assert len(event["jobs"]) == 1
            job: dict[str, Any] = event["jobs"][0]
            return job
    raise AssertionError(f"the job is not shown so, but {event['jobs']}")


def test_a_bulk_request_is_a_job_while_it_is_open(served_model: ServedModel) -> None:
    def answer_short(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if request.max_new_tokens < 5 else None

    engine = FakeEngine(answer_short, sample=lambda _: SAMPLE)
    content = b"".join(line(number, "abcdef", 9 if number == 0 else 3) for number in range(8)) + b"no line\n"
    headers = {"X-Toka-Job-Name": "na%C3%AFve%20map", "X-Toka-Job-Lines": "9"}
    with live_server(served_model, engine, price_per_hour=3.6) as server, watching(server) as events:
        with server.http.stream("POST", "/v1/bulk", content=content, headers=headers):
            job = job_of(events, {"lines": {"total": 9, "done": 7, "failed": 1, "running": 1}})
            assert (job["kind"], job["name"], job["state"]) == ("bulk", "naïve map", "running")
            assert job["id"].startswith("bulk_")
            assert job["tokens"] == {"prompt": 7 * 6, "generated": 7 * 3}
            assert abs(job["started"] - time.time()) < 60
            # Meanwhile the engine was busy for 20 s, and computed as many tokens of others as of these.
            work, own = server.client.work_done.num_tokens, 7 * (6 + 3)
            share = own / (work + own)
            engine.stats = replace(
                engine.stats,
                total_forward_seconds=20.0,
                total_generation_tokens=engine.stats.total_generation_tokens + own,
            )
            engine.updates.send(EngineUpdate([], engine.stats))
            cost = {"device_seconds": round(20 * share, 3), "price": round(0.02 * share, 6)}
            job_of(events, {"cost": cost})
        job = job_of(events, {"state": "cancelled"})
        assert job["lines"] == {"total": 9, "done": 7, "failed": 1, "running": 0}
        assert job["cost"] == cost


@pytest.mark.parametrize(("metadata", "name"), [({"name": "night"}, "night"), ({"who": "me"}, "in.jsonl")])
def test_a_batch_is_a_job_while_it_runs_and_after_its_end(
    metadata: dict[str, str], name: str, served_model: ServedModel, tmp_path: Path
) -> None:
    is_seen = threading.Event()

    def answer_when_seen(request: GenerateRequest, index: int) -> Reply:
        assert is_seen.wait(60)
        return echo(request, index)

    engine = FakeEngine(answer_when_seen)
    content = b"".join(line(number, "abcdef", 3) for number in range(5))
    with live_server(served_model, engine, data_dir=tmp_path) as server, watching(server) as events:
        assert next(events)["jobs"] == []
        file = server.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = server.http.post("/v1/batches", json={**body, "metadata": metadata}).json()
        job = job_of(events, {"state": "running", "lines": {"total": 5, "done": 0, "failed": 0, "running": 5}})
        assert (job["id"], job["kind"], job["name"]) == (batch["id"], "batch", name)
        is_seen.set()
        job = job_of(events, {"state": "finished", "lines": {"total": 5, "done": 5, "failed": 0, "running": 0}})
        assert job["tokens"] == {"prompt": 5 * 6, "generated": 5 * 3}
        assert job["eta_seconds"] is None
        assert next(events)["jobs"][0]["state"] == "finished"


def end_batch(server: LiveServer, content: bytes) -> dict[str, Any]:
    """A new batch, once it has ended."""
    file = server.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch: dict[str, Any] = server.http.post("/v1/batches", json=body).json()
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        batch = server.http.get(f"/v1/batches/{batch['id']}").json()
    return batch


def test_who_comes_later_sees_how_the_last_jobs_ended(served_model: ServedModel, tmp_path: Path) -> None:
    engine = FakeEngine()
    with live_server(served_model, engine, data_dir=tmp_path, price_per_hour=1.0) as server:
        good = end_batch(server, line(0, "abc", 3) + line(1, "abcdef", 3))
        bad = end_batch(server, line(0, "abc", 3) + b"{}\n")
        lines = line(0, "abc", 3) + b"no line\n"
        assert server.http.post("/v1/bulk", content=lines, headers={"X-Toka-Job-Name": "a%20map"}).status_code == 200
        with watching(server) as events:
            jobs = {job["id"]: job for job in next(events)["jobs"]}
    completed = jobs.pop(good["id"])
    assert [completed[name] for name in ("state", "lines", "ended", "reason", "cost")] == [
        "finished",
        {"total": 2, "done": 2, "failed": 0, "running": 0},
        good["completed_at"],
        None,
        {"device_seconds": None, "price": None},
    ]
    failed = jobs.pop(bad["id"])
    assert (failed["state"], failed["ended"]) == ("failed", bad["failed_at"])
    assert failed["reason"] == f"line 2: {bad['errors']['data'][0]['message']}"
    (bulk,) = jobs.values()
    assert (bulk["name"], bulk["state"], bulk["tokens"]["generated"]) == ("a map", "finished", 3)
    assert bulk["lines"] == {"total": 2, "done": 1, "failed": 1, "running": 0}
    assert abs(bulk["ended"] - time.time()) < 60
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server, watching(server) as events:
        after = [(job["id"], job["state"], job["ended"]) for job in next(events)["jobs"]]
    assert sorted(after) == sorted(
        [(good["id"], "finished", good["completed_at"]), (bad["id"], "failed", bad["failed_at"])]
    ), "of the server before"


def test_the_newest_twenty_ended_jobs_are_told(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine()) as server:
        for number in range(23):
            headers = {"X-Toka-Job-Name": f"job {number}"}
            assert server.http.post("/v1/bulk", content=line(0, "abc", 1), headers=headers).status_code == 200
        with watching(server) as events:
            assert [job["name"] for job in next(events)["jobs"]] == [f"job {number}" for number in range(22, 2, -1)]
            headers = {"X-Toka-Job-Name": "job 23"}
            assert server.http.post("/v1/bulk", content=line(0, "abc", 1), headers=headers).status_code == 200
            for event in itertools.islice(events, 20):
                names = [job["name"] for job in event["jobs"]]
                if names[0] == "job 23":
                    break
            assert names == [f"job {number}" for number in range(23, 3, -1)]


def test_a_recording_keeps_a_job_for_a_minute_after_its_end(served_model: ServedModel, tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None:
        bulks = OpenBulks()
        for name, age_s in (("old", 61.0), ("new", 50.0)):
            bulk = OpenBulk("a client", client.work_done, name=name)
            with bulks.listed(bulk):
                pass
            bulk.ended = time.time() - age_s
        state = SimpleNamespace(engine=client, model=served_model, config=ServerConfig())
        with opened_recording(str(tmp_path / "recording")) as recording:
            feed = LiveFeed(cast(ServerState, state), None, bulks, recording)
            async with feed.running():
                events = feed.listen()
                told = orjson.loads((await anext(events))[6:])
                await events.aclose()
                await asyncio.sleep(1.5 * SAMPLE_SECONDS)
        assert [job["name"] for job in told["jobs"]] == ["new", "old"]

    run_with([FakeEngine(sample=lambda _: SAMPLE)], use)
    (first, *_) = map(orjson.loads, (tmp_path / "recording").read_bytes().splitlines())
    assert [job["name"] for job in first["jobs"]] == ["new"]


def test_a_listener_that_reads_slowly_gets_the_newest_event_and_no_backlog(served_model: ServedModel) -> None:
    async def use(client: EngineClient) -> None:
        state = SimpleNamespace(engine=client, model=served_model, config=ServerConfig())
        feed = LiveFeed(cast(ServerState, state), None, OpenBulks(), None)
        async with feed.running():
            events = feed.listen()
            first = orjson.loads((await anext(events))[6:])
            await asyncio.sleep(8 * SAMPLE_SECONDS)
            stale = orjson.loads((await anext(events))[6:])
            assert stale["time"] - first["time"] > 5 * SAMPLE_SECONDS
            newest = orjson.loads((await anext(events))[6:])
            assert newest["time"] - stale["time"] > 0.5 * SAMPLE_SECONDS, "taken afterwards"
            assert len(feed._listeners) == 1
            await events.aclose()
            assert len(feed._listeners) == 0

    run_with([FakeEngine(sample=lambda _: SAMPLE)], use)
