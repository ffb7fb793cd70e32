"""A worker or manager that is killed or stopped: the port stays open, the engine starts again, no answer is lost."""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.examples import IS_NIGHTLY

FLAGS = ("dtype=float32", "kv_cache_num_tokens=8192", "max_tokens_per_forward=256", "max_seqs_per_forward=8")
NUM_REQUESTS = 6 if IS_NIGHTLY else 4
LONG = 150 if IS_NIGHTLY else 60
"""Tokens of a request that is still running when the engine dies."""


def body(number: int, **fields: object) -> dict[str, object]:
    return {"model": "default", "prompt": f"Story {number}", "seed": number, "ignore_eos": True, **fields}


def texts(url: str, number: int) -> list[str]:
    answer = httpx.post(f"{url}/v1/completions", json=body(number, n=2, max_tokens=LONG), timeout=300)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def stream_events(url: str, number: int, begun: threading.Event) -> list[dict[str, Any]]:
    """The events of a stream that is too long to end before the engine dies."""
    fields = {"max_tokens": 450, "n": 8, "stream": True}
    events = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body(number, **fields), timeout=300) as answer:
        for line in answer.iter_lines():
            if line:
                begun.set()
                events.append(line.removeprefix("data: "))
    return [json.loads(event) for event in events if event != "[DONE]"]


@contextmanager
def watched_health(url: str) -> Iterator[list[float]]:
    """Asks /health all the time -> the seconds that each answer took. The port must never be closed."""
    seconds: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)  # a new one each time
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            seconds.append(time.monotonic() - began_s)
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            yield seconds
        finally:
            is_over.set()
            watcher.result()


def is_ready(toka: TokaProcess) -> bool:
    return httpx.get(f"{toka.url}/ready", timeout=30).status_code == 200


def kill_under_load(toka: TokaProcess, title: str, number: signal.Signals) -> tuple[list[list[str]], dict[str, Any]]:
    """Signals the process while requests run and wait -> the texts of the whole answers, and the stream's last event.

    The stream begins before the signal, and is the first to run.
    """
    with ThreadPoolExecutor(NUM_REQUESTS + 1) as pool:
        begun = threading.Event()
        stream = pool.submit(stream_events, toka.url, 99, begun)
        assert begun.wait(60)
        answers: list[Future[list[str]]] = [pool.submit(texts, toka.url, n) for n in range(NUM_REQUESTS)]
        wait_for(lambda: toka.gauge("toka_requests_waiting") > NUM_REQUESTS, 60)
        os.kill(toka.children()[title], number)
        wait_for(lambda: not is_ready(toka), 120)
        refused = httpx.get(f"{toka.url}/ready")
        assert refused.json()["error"]["code"] == "engine_restarting"
        assert int(refused.headers["Retry-After"]) > 0
        events = stream.result()
        assert [event for event in events if "error" in event] == events[-1:], "one error event, at the end"
        return [answer.result() for answer in answers], events[-1]


@pytest.mark.parametrize(
    ("title", "number", "tp_size"),
    [
        ("toka-worker-1", signal.SIGKILL, 2),  # the other rank waits for it in a collective
        pytest.param("toka-worker-0", signal.SIGKILL, 1, marks=pytest.mark.long),
        pytest.param("toka-manager", signal.SIGKILL, 1, marks=pytest.mark.long),
        pytest.param("toka-worker-0", signal.SIGSTOP, 1, marks=pytest.mark.long),
        pytest.param("toka-manager", signal.SIGSTOP, 1, marks=pytest.mark.long),
    ],
)
def test_requests_outlive_the_death_of_a_part_of_the_engine(
    title: str, number: signal.Signals, tp_size: int, model: Path
) -> None:
    with running_toka(f"model={model}", *FLAGS, "watchdog_seconds=3", f"tp_size={tp_size}") as toka:
        expected = [texts(toka.url, n) for n in range(NUM_REQUESTS)]
        before = toka.children()
        with watched_health(toka.url) as seconds:
            found, last_event = kill_under_load(toka, title, number)
        assert found == expected
        assert last_event["error"]["code"] == "engine_died"
        assert max(seconds) < 5, "also on a busy machine; make torture measures a free one"
        wait_for(lambda: is_ready(toka), 120)
        after = toka.children()
        assert after["toka-server"] == before["toka-server"]
        assert after.keys() == before.keys()
        for rank in range(tp_size):
            assert after[f"toka-worker-{rank}"] != before[f"toka-worker-{rank}"]
        assert toka.gauge("toka_engine_restarts_total") == 1
        wait_for(lambda: toka.gauge("toka_kv_blocks_used") == 0, 60)
        assert texts(toka.url, 0) == expected[0]
        assert toka.stop() == 0


@pytest.mark.long
def test_a_long_step_is_not_taken_for_a_hang(model: Path) -> None:
    """48 prompts of 500 tokens are prefilled in one step, with the slowest attention, under a short watchdog."""
    slow = ("cpu_isa=torch", "attention_backend=reference", "max_tokens_per_forward=24000")
    sizes = ("dtype=float32", "kv_cache_num_tokens=30000", "max_step_seconds=600")
    with running_toka(f"model={model}", *slow, *sizes, "watchdog_seconds=1") as toka:
        prompts = [[(token + number) % 200 for token in range(500)] for number in range(48)]
        began_s = toka.gauge("toka_forward_seconds_total")
        answer = httpx.post(
            f"{toka.url}/v1/completions", json={"model": "default", "prompt": prompts, "max_tokens": 1}, timeout=300
        )
        assert answer.status_code == 200
        assert toka.gauge("toka_engine_restarts_total") == 0, toka.lines
        assert toka.gauge("toka_forward_seconds_total") - began_s > 1, "the step takes longer than the watchdog's time"


@pytest.mark.long
def test_new_requests_may_be_refused_during_a_restart(model: Path) -> None:
    with running_toka(f"model={model}", *FLAGS, "while_restarting=refuse") as toka:
        expected = texts(toka.url, 1)
        os.kill(toka.children()["toka-manager"], signal.SIGKILL)
        wait_for(lambda: not is_ready(toka), 120)
        refused = httpx.post(f"{toka.url}/v1/completions", json=body(1), timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(refused.headers["Retry-After"]) > 0
        wait_for(lambda: is_ready(toka), 120)
        assert texts(toka.url, 1) == expected


@pytest.mark.long
def test_new_requests_wait_for_the_end_of_a_restart(model: Path) -> None:
    with running_toka(f"model={model}", *FLAGS) as toka:
        expected = texts(toka.url, 1)
        os.kill(toka.children()["toka-worker-0"], signal.SIGKILL)
        wait_for(lambda: not is_ready(toka), 120)
        assert texts(toka.url, 1) == expected
        assert is_ready(toka)
