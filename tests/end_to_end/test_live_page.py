"""The live page in headless Chromium, over a real server under load, and over the recording of it."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, wait_for
from tests.helpers.chromium import CHROMIUM, Tab, chromium
from tests.helpers.limits import join

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

FORECAST = (
    "(() => { const svg = document.querySelector('#pool-plot svg'), path = svg.querySelector('path.forecast');"
    " return path && [document.getElementById('main').dataset.time, path.getAttribute('d'), { ...svg.dataset },"
    " document.getElementById('running').textContent]; })()"
)
QUESTION = "Tell a long story about a river. " * 8


@contextmanager
def under_load(url: str) -> Iterator[None]:
    """As in repeated sampling: many samples of a few prompts."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            body = {"model": "default", "prompt": f"{number}. {QUESTION}", "n": 6, "max_tokens": 90, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            join(thread)


@contextmanager
def listening(url: str) -> Iterator[list[dict[str, Any]]]:
    """The events of /live so far, beside the page."""
    events: list[dict[str, Any]] = []
    is_over = threading.Event()

    def listen() -> None:
        with httpx.stream("GET", f"{url}/live", timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(orjson.loads(line.removeprefix("data: ")))
                if is_over.is_set():
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield events
    finally:
        is_over.set()
        join(thread)


def assert_is_drawn(shown: tuple[str, str, dict[str, str], str], events: list[dict[str, Any]]) -> None:
    """The line of the forecast has the points of the event that the page shows."""
    time, path, data, running = shown
    (event,) = [event for event in events if event["time"] == float(time)]
    (replica,) = event["replicas"]
    if "forecast" not in replica:
        return  # the manager was busy: the page shows the one before, as test_samples.py has it
    assert running == str(replica["running"])
    first, last = map(float, data["seconds"].split())
    left, top, right, bottom = map(float, data["plot"].split())
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
    seconds = [first + (x - left) / (right - left) * (last - first) for x, _ in points]
    blocks = [(bottom - y) / (bottom - top) * float(data["largest"]) for _, y in points]
    forecast = replica["forecast"]
    pixel = (last - first) / (right - left), float(data["largest"]) / (bottom - top)
    assert seconds == pytest.approx([step * replica["step_seconds"] for step in forecast["steps"]], abs=0.1 * pixel[0])
    assert blocks == pytest.approx(forecast["blocks"], abs=0.1 * pixel[1])


def known(replica: dict[str, Any]) -> set[str]:
    return {name for name, value in replica.items() if value is not None}


@pytest.fixture
def tab() -> Iterator[Tab]:
    with chromium() as open_tab:
        opened = open_tab()
        opened.set_size(1280, 800)
        yield opened
        assert opened.errors == []
        assert opened.hosts() == {"127.0.0.1"}


@pytest.mark.long
def test_the_page_shows_what_the_server_does_and_replays_it(demo_model: TokaProcess, tab: Tab, tmp_path: Path) -> None:
    url = demo_model.url
    with under_load(url), listening(url) as events:
        tab.open(url)
        checked: set[str] = set()

        def draws_what_was_sent() -> bool:
            shown = tab.run(FORECAST)
            if shown is not None and any(event["time"] == float(shown[0]) for event in events):
                assert_is_drawn(shown, events)
                checked.add(shown[0])
            return len(checked) >= 3

        tab.wait_for(draws_what_was_sent, "three events are drawn")
        wait_for(lambda: len(events) >= 6 and any(event["replicas"][0].get("lengths") for event in events), 60)
        tab.wait("Number(document.getElementById('generated').textContent) > 0")
        tab.wait("document.querySelector('#lengths-plot path.new').getAttribute('d') !== ''")
        assert tab.run("document.querySelectorAll('#parts .group').length") >= 2
        assert "SmolLM2" in tab.run("document.getElementById('model').textContent")
        # before the first result, no forecast has a time
        recorded = [event for event in list(events) if {"forecast", "step_seconds"} <= known(event["replicas"][0])]
    recording = tmp_path / "run.jsonl"
    recording.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in recorded))
    tab.open(f"{url}/?replay")
    tab.choose_file("#file", recording)
    tab.wait("document.getElementById('play').textContent === 'Pause'")
    tab.run("document.getElementById('play').click()")
    for event in (recorded[0], recorded[len(recorded) // 2], recorded[-1]):
        milliseconds = 1000 * (event["time"] - recorded[0]["time"]) + 1
        tab.run(
            f"(() => {{ const scrub = document.getElementById('scrub'); scrub.value = {milliseconds};"
            " scrub.dispatchEvent(new Event('input')); })()"
        )
        assert_is_drawn(tab.run(FORECAST), [event])
