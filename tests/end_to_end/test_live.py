"""GET /live and record= on a real server: one replica whose KV cache is too small, and two of which one dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.limits import join

KEY = "s3cret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
FLAGS = ("dtype=float32", "max_tokens_per_forward=256", "max_seqs_per_forward=32", f"api_key={KEY}")


class Watcher(threading.Thread):
    """Keeps the events of a server until it ends the stream."""

    def __init__(self, toka: TokaProcess) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.has_ended = False
        self._url = f"{toka.url}/live"

    def run(self) -> None:
        with httpx.stream("GET", self._url, headers=HEADERS, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(json.loads(line.removeprefix("data: ")))
        self.has_ended = True

    def wait_for(self, number: int = 1) -> None:
        """Until so many more events have come."""
        wanted = len(self.events) + number
        wait_for(lambda: len(self.events) >= wanted, 60)


class Load:
    """Clients that ask again and again; counts the answers."""

    def __init__(self, toka: TokaProcess, num_clients: int, max_tokens: int) -> None:
        self.num_answers = 0
        self._url = f"{toka.url}/v1/completions"
        self._body = {"model": "default", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "n": 4}
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            join(thread)

    def _ask(self, index: int) -> None:
        body = self._body | {"prompt": f"{index} " + "word " * 20}
        while not self._is_over.is_set():
            answer = httpx.post(self._url, json=body, headers=HEADERS, timeout=240)
            if answer.status_code == 200:
                with self._lock:
                    self.num_answers += 1


def first_event(toka: TokaProcess) -> dict[str, Any]:
    with httpx.stream("GET", f"{toka.url}/live", headers=HEADERS, timeout=60) as response:
        first: dict[str, Any] = json.loads(next(response.iter_lines()).removeprefix("data: "))
    return first


def told_later(toka: TokaProcess) -> list[tuple[int, int]]:
    """(answered requests, running sequences) of the past that who comes now is told."""
    first = first_event(toka)
    return [(one["requests"]["answered"], one["replicas"][0].get("running")) for one in first["past"]]


def test_a_small_kv_cache_is_seen_to_fill_and_its_recording_has_the_same_events(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    with running_toka(f"model={model}", *FLAGS, "kv_cache_num_tokens=2048", f"record={record}") as toka:
        assert httpx.get(f"{toka.url}/live").status_code == 401
        page = httpx.get(toka.url)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        watcher = Watcher(toka)
        watcher.start()
        watcher.wait_for()
        with Load(toka, 12, max_tokens=150) as load:
            watcher.wait_for(4)
        watcher.wait_for(2)
        wait_for(lambda: (load.num_answers, 0) in told_later(toka), 30)
        started = time.monotonic()
        assert toka.stop() == 0
        assert time.monotonic() - started < 10, "those who watch do not hold up the end"
        watcher.join(10)
    assert watcher.has_ended
    assert watcher.events[-1]["server"]["ended"] == "it was stopped (SIGTERM or Ctrl-C)"
    assert isinstance(watcher.events[0].pop("past"), list)
    replicas = [event["replicas"][0] for event in watcher.events]
    busy = [one for one in replicas if one.get("running") and "forecast" in one]  # its sample came in time
    assert busy
    for one in replicas:
        if "blocks" in one:
            assert sum(one["blocks"][name] for name in ("own", "shared", "cached", "free")) == one["blocks"]["total"]
    forecasts = [one["forecast"] for one in busy if one["forecast"] is not None]
    assert any(forecast["peak"] > 0.8 * forecast["limit"] for forecast in forecasts), "admission fills the cache"
    assert all(forecast["blocks"][-1] == 0 for forecast in forecasts)
    assert any(one["next"] is not None and one["next"]["blocked_by"] == "blocks" for one in busy)
    assert sum(one["events"]["finished"] for one in replicas if "events" in one) == load.num_answers * 4
    assert {tuple(pair) for one in replicas for pair in one.get("lengths", ())} == {(150, 150)}
    assert watcher.events[-1]["requests"] == {"open": 0, "answered": load.num_answers, "aborted": 0, "failed": 0}
    assert replicas[-1]["tokens"]["generated"] == load.num_answers * 4 * 150
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    by_time = {event["time"]: event for event in recorded}
    assert len(recorded) >= len(watcher.events) - 1
    assert all(by_time[event["time"]] == event for event in watcher.events[:-1])


@pytest.mark.long
def test_of_two_replicas_one_dies_and_comes_back_before_the_eyes_of_who_watches(model: Path) -> None:
    with running_toka(f"model={model}", *FLAGS, "kv_cache_num_tokens=16384", "dp_size=2") as toka:
        watcher = Watcher(toka)
        watcher.start()
        with Load(toka, 8, max_tokens=200):
            watcher.wait_for(2)
        assert [one["state"] for one in watcher.events[-1]["replicas"]] == ["up", "up"]
        assert watcher.events[-1]["server"]["dp_size"] == 2
        children = toka.children()
        os.kill(next(pid for title, pid in children.items() if title.startswith("toka-manager1")), signal.SIGKILL)
        first = len(watcher.events)
        wait_for(lambda: any(event["replicas"][1]["state"] == "down" for event in watcher.events[first:]), 60)
        wait_for(lambda: watcher.events[-1]["replicas"][1]["state"] == "up", 120)
        watcher.wait_for(1)
        replicas = watcher.events[-1]["replicas"]
        assert [one["restarts"] for one in replicas] == [0, 1]
        assert replicas[0]["tokens"]["generated"] > 0 == replicas[1]["tokens"]["generated"]
        assert toka.stop() == 0
        watcher.join(10)
    assert watcher.has_ended


@pytest.mark.long
def test_who_watches_is_told_that_a_process_has_failed(model: Path) -> None:
    with running_toka(f"model={model}", *FLAGS, "kv_cache_num_tokens=16384", "max_restarts=0") as toka:
        watcher = Watcher(toka)
        watcher.start()
        watcher.wait_for(2)
        title = next(title for title in toka.children() if title.startswith("toka-manager"))
        os.kill(toka.children()[title], signal.SIGKILL)
        watcher.join(60)
        assert watcher.has_ended
        assert watcher.events[-1]["server"]["ended"] == "one of its processes has failed"
        assert toka.process.wait(60) == 1


@pytest.mark.long
def test_after_a_restart_of_the_http_server_it_is_the_same_server_with_a_new_past(model: Path) -> None:
    with running_toka(f"model={model}", *FLAGS, "kv_cache_num_tokens=16384") as toka:
        body = {"model": "default", "prompt": "a", "max_tokens": 20, "ignore_eos": True}
        assert httpx.post(f"{toka.url}/v1/completions", json=body, headers=HEADERS, timeout=60).status_code == 200
        before = first_event(toka)
        pid = toka.children()["toka-server"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: toka.children().get("toka-server", pid) != pid, 60)
        toka.wait_until_ready()
        after = first_event(toka)
        assert after["server"]["started"] == before["server"]["started"]
        assert after["replicas"][0]["tokens"] == before["replicas"][0]["tokens"], "of the manager, which goes on"
        assert after["past"] == [] or after["past"][0]["time"] > before["time"]
        assert toka.stop() == 0


@pytest.mark.long
def test_a_file_that_is_no_recording_stops_the_start_with_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes\n")
    command = [sys.executable, "-m", "tokasaurus", f"model={model}", "port=0", f"record={tmp_path}/notes.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "is no recording" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
