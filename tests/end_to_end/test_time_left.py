"""The time left of real jobs: everybody shows the same figure, and after a fifth of the job it is about right."""

import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.limits import join
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus import Client, Sampling
from tokasaurus.library.bulk import Progress
from tokasaurus.library.map.progress import MapProgress
from tokasaurus.messages.status import TimeLeft
from tokasaurus.monitoring.progress import show_left
from tokasaurus.monitoring.step_stats import short_range

Range = tuple[float, float]


@pytest.fixture(scope="module")
def toka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokaProcess]:
    directory: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "llama")
    flags = ("dtype=float32", "device=cpu", "kv_cache_num_tokens=32768", "max_seqs_per_forward=24")
    with running_toka(
        f"model={directory}", "stats_report_seconds=1", f"data_dir={directory / 'data'}", *flags
    ) as process:
        yield process


class Watch:
    """What the live page gets, as long as a job runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.events: list[dict[str, Any]] = []
        self._has_begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Watch":
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        join(self._thread)

    def _read(self) -> None:
        with httpx.stream("GET", f"{self._url}/live", timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self._has_begun.set()
                if self._ends.is_set():
                    return

    def course(self) -> list[tuple[float, Range, Range | None]]:
        """(time, range of the newest job, range of the replica) of the events in which it was told."""
        newest = max((job for event in self.events for job in event["jobs"]), key=lambda job: job["started"])["id"]
        found = []
        for event in self.events:
            for job in event["jobs"]:
                if job["id"] == newest and job["state"] == "running" and job["eta_range"] is not None:
                    told = event["replicas"][0].get("eta_range")
                    found.append((event["time"], tuple(job["eta_range"]), None if told is None else tuple(told)))
        return found

    def span(self) -> Range:
        """When the newest job began and ended."""
        job = max((job for event in self.events for job in event["jobs"]), key=lambda job: job["started"])
        (ended,) = {one["ended"] for event in self.events for one in event["jobs"] if one["id"] == job["id"]} - {None}
        return job["started"], ended


def assert_about_right(name: str, watch: Watch, most: float = 3.0) -> None:
    """The middle of the ranges that were told between 20 and 80 % of the time; a machine's speed may vary meanwhile.

    most: the factor. Beside other tests, the machine may be half as fast a moment later."""
    began, ended = watch.span()
    factors = []
    for when, (low_s, high_s), _ in watch.course():
        if 0.2 <= (when - began) / (ended - began) <= 0.8:
            factors.append((low_s * high_s) ** 0.5 / (ended - when))
            print(f"{name:30s} {when - began:5.1f} s: {low_s:5.1f} to {high_s:5.1f}, true {ended - when:5.1f}")
    assert len(factors) >= 2, "the job was too short"
    assert 1 / most < statistics.median(factors) < most, (name, factors)


def made(
    length: Callable[[random.Random], int],
    prompt: Callable[[random.Random], int],
    prefix: str = "a",
    fields: dict[str, int] | None = None,
) -> Any:
    def make(rng: random.Random, num: int) -> list[dict[str, Any]]:
        texts = [prefix + text(rng, prompt(rng)) for _ in range(num)]
        return [{"prompt": one, "max_tokens": length(rng), **(fields or {})} for one in texts]

    return make


def text(rng: random.Random, num_letters: int) -> str:
    return "".join(rng.choices("abcdefgh ", k=num_letters))


def in_order(make: Any, key: str, is_falling: bool) -> Any:
    def order(row: dict[str, Any]) -> int:
        return len(row[key]) if key == "prompt" else row[key]

    return lambda rng, num: sorted(make(rng, num), key=order, reverse=is_falling)


def between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def long_tail(rng: random.Random) -> int:
    return min(300, 1 + round(60 * rng.lognormvariate(0, 0.8)))


USUAL = made(between(20, 180), between(10, 60))
PROMPTS = made(between(20, 20), between(5, 300))
KINDS: dict[str, tuple[int, Any]] = {
    "uniform short": (5_000, made(between(20, 30), between(20, 20))),
    "long tail": (1_600, made(long_tail, between(20, 20))),
    "long prompts, short answers": (2_000, made(between(3, 10), between(250, 300))),
    "short prompts, long answers": (500, made(between(200, 300), between(8, 8))),
    "sorted, short answers first": (1_500, in_order(USUAL, "max_tokens", False)),
    "sorted, long answers first": (1_500, in_order(USUAL, "max_tokens", True)),
    "sorted, short prompts first": (2_000, in_order(PROMPTS, "prompt", False)),
    "sorted, long prompts first": (2_000, in_order(PROMPTS, "prompt", True)),
    "eight samples": (180, made(between(20, 180), between(200, 300), fields={"n": 8})),
    "one prefix": (1_500, made(between(20, 180), between(0, 0), "a prefix " * 25)),
}
ALSO_QUICK = "one prefix"


def run_batch(toka: TokaProcess, directory: Path, kind: str) -> tuple[Watch, set[Range], str]:
    """`toka batch` on the running server: what the page was told, what GET /v1/batches/{id} said of the time left every
    0.2 s, and what the command has written to stderr."""
    num_rows, make = KINDS[kind]
    source = directory / "in.jsonl"
    with source.open("w") as file:
        for number, row in enumerate(make(random.Random(kind), num_rows)):
            body = {"model": "default", **row, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    words = (f"input={source}", f"output={directory / 'out.jsonl'}", f"base_url={toka.url}/v1")
    with Watch(toka.url) as watch:
        command = [sys.executable, "-m", "tokasaurus", "batch", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            asked: set[Range] = set()
            while process.poll() is None:
                for job in watch.events[-1]["jobs"]:
                    if job["state"] == "running":
                        batch = httpx.get(f"{toka.url}/v1/batches/{job['id']}", timeout=60).json()
                        seconds = batch.get("progress", {}).get("seconds_left")
                        asked |= {tuple(seconds)} if seconds else set()
                time.sleep(0.2)
            assert process.stderr is not None
            shown = process.stderr.read()
        assert process.returncode == 0, shown
        time.sleep(1.5)  # an event that has its end
    return watch, asked, shown


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != ALSO_QUICK])
def test_a_batch_ends_when_it_was_said(toka: TokaProcess, tmp_path: Path, kind: str) -> None:
    watch, _, _ = run_batch(toka, tmp_path, kind)
    assert_about_right(kind, watch, most=1.5)


def test_the_page_the_log_and_the_bar_of_a_batch_tell_the_same(toka: TokaProcess, tmp_path: Path) -> None:
    num_lines = len(toka.lines)
    watch, asked, shown = run_batch(toka, tmp_path, ALSO_QUICK)
    assert_about_right(ALSO_QUICK, watch)
    course = watch.course()
    jobs = {job for _, job, _ in course}
    replicas = [replica for _, _, replica in course if replica is not None]
    assert sum(replica in jobs for replica in replicas) >= 0.8 * len(replicas), "the sum has the figure of its only job"
    bars = re.findall(r"tokens/s, (.*) left", shown)
    assert set(bars) <= {"–", *(show_left(TimeLeft(*job)) for job in asked | jobs)}, shown
    assert sum(job in asked for job in jobs) >= 0.8 * len(jobs), "the batch tells the page's figures"
    logged = [line.rpartition(" done, ETA ")[2] for line in toka.lines[num_lines:] if " done, ETA " in line]
    same = [text for text in logged if text in {short_range(TimeLeft(*job)) for job in jobs}]
    assert len(same) >= 0.6 * len(logged), "before the first end of a completion, the log has an estimate of its own"


def test_the_bar_of_a_map_tells_what_the_page_does(toka: TokaProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    monkeypatch.setattr(MapProgress, "update", lambda _self, _counts, progress: told.append(progress))
    rows = [{"q": text(random.Random(number), 30)} for number in range(6_000)]
    with Client(toka.url) as client, Watch(toka.url) as watch:
        client.map(rows, prompt="q", sampling=Sampling(max_tokens=60, ignore_eos=True))
        time.sleep(1.5)
    assert_about_right("map", watch)
    jobs = [job for _, job, _ in watch.course()]
    bar = {tuple(round(end_s, 1) for end_s in one.time_left) for one in told if one is not None and one.time_left}
    assert bar
    assert sum(job in bar for job in jobs) >= 0.4 * len(jobs), "each is told within a second"
