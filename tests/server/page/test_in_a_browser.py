"""The page in headless Chromium, over events that were made up. test_live_figures.py has a real server."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.helpers.chromium import Tab
from tests.server.page.helpers.live_pages import LivePages, live_pages
from tests.server.page.helpers.recordings import simulated_events, write_recording
from tokasaurus.server.page import read_live_page

IS_LIVE = "document.getElementById('state').dataset.state === 'live'"
IS_STATE = "document.getElementById('state').dataset.state === '{}'"


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return simulated_events(100)


@pytest.fixture
def pages(events: list[dict[str, Any]]) -> Iterator[LivePages]:
    with live_pages() as served:
        served.events = events
        yield served


def moment(time: float, used: int, restarts: int = 0, **changes: Any) -> dict[str, Any]:
    """Of the server's own past."""
    one = {"index": 0, "state": "up", "restarts": restarts, "running": used // 10, "waiting": 1, "queue_depth": 2}
    one["tokens"] = {"prompt": 0, "generated": int(60 * time)}
    one["blocks"] = {"total": 1_500, "used": used, "cached": 100, "free": 1_400 - used}
    one["events"] = {"preempted": 1, "evicted": 2}
    requests = {"open": 0, "answered": int(time), "aborted": 0, "failed": int(time // 100)}
    return {"time": time, "requests": requests, "replicas": [one | changes]}


def idle(time: float, restarts: int = 0, **changes: Any) -> dict[str, Any]:
    """An event of a server that does nothing."""
    one = moment(time, 0, restarts)
    replica = {**one["replicas"][0], "forecast": None, "next": None, "step_seconds": 0.1, "running": 0, "waiting": 0}
    replica["blocks"] = {"total": 1_500, "own": 0, "shared": 0, "cached": 100, "free": 1_400}
    server = {"model": "small", "started": 1.0, "ended": None}
    return {"format": 1, "server": server, **one, "replicas": [replica], **changes}


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({orjson.dumps(selector).decode()}).innerText"))


def click(tab: Tab, selector: str) -> None:
    tab.run(f"document.querySelector({orjson.dumps(selector).decode()}).click()")


def drawn(tab: Tab, selector: str) -> list[tuple[float, float]]:
    """The points of a line of the pool's chart: (seconds from now, blocks), by the chart's own scale."""
    path, data = tab.run(
        f"(() => {{ const svg = document.querySelector('#pool-plot svg');"
        f" return [svg.querySelector('{selector}').getAttribute('d'), {{ ...svg.dataset }}]; }})()"
    )
    first, last = map(float, data["seconds"].split())
    left, top, right, bottom = map(float, data["plot"].split())
    points = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
    largest = float(data["largest"])
    return [
        (first + (x - left) / (right - left) * (last - first), (bottom - y) / (bottom - top) * largest)
        for x, y in points
    ]


def assert_drawn(points: list[tuple[float, float]], seconds: list[float], blocks: list[int]) -> None:
    """To a tenth of a pixel, of 500 over 150 seconds and of 250 over 1,500 blocks."""
    assert [time for time, _ in points] == pytest.approx(seconds, abs=0.05)
    assert [value for _, value in points] == pytest.approx(blocks, abs=0.6)


def test_live_figures_and_the_forecast_are_those_of_the_events(
    tab: Tab, pages: LivePages, events: list[dict[str, Any]]
) -> None:
    tab.open(pages.url)
    last = events[-1]["replicas"][0]
    tab.wait(f"document.getElementById('running').textContent === '{last['running']}'")
    assert text_of(tab, "#state-text") == "live"
    assert text_of(tab, "#model") == "simulated-1B"
    assert "cpu bfloat16 · up 68 min" in text_of(tab, "#facts")
    used = last["blocks"]["own"] + last["blocks"]["shared"]
    assert text_of(tab, "#pool") == f"{round(100 * used / last['blocks']['total'])} %"
    assert text_of(tab, "#waiting") == str(last["waiting"])
    rates = [
        (b["replicas"][0]["tokens"]["generated"] - a["replicas"][0]["tokens"]["generated"]) / (b["time"] - a["time"])
        for a, b in pairwise(events)
    ]
    assert text_of(tab, "#generated") == f"{np.mean(rates[-5:]):,.0f}"
    forecast, seconds = last["forecast"], last["step_seconds"]
    assert_drawn(drawn(tab, "path.forecast"), [step * seconds for step in forecast["steps"]], forecast["blocks"])
    # what was forecast a minute ago, on the same axis
    made = min(events, key=lambda event: abs(events[-1]["time"] - 60 - event["time"]))
    then, earlier = made["replicas"][0], made["replicas"][0]["forecast"]
    shift = made["time"] - events[-1]["time"]
    times = [step * then["step_seconds"] + shift for step in earlier["steps"]]
    assert_drawn(drawn(tab, "path.earlier"), times, earlier["blocks"])
    # and what was then in use
    in_use = [event["replicas"][0]["blocks"]["own"] + event["replicas"][0]["blocks"]["shared"] for event in events]
    assert_drawn(drawn(tab, "path.edge-used"), [event["time"] - events[-1]["time"] for event in events], in_use)
    assert text_of(tab, "#next-what").startswith(("Next in the queue", "Nothing waits"))
    jobs = events[-1]["jobs"]
    assert tab.run("document.querySelectorAll('#job-rows li').length") == len(jobs)
    share = (jobs[0]["lines"]["done"] + jobs[0]["lines"]["failed"]) / jobs[0]["lines"]["total"]
    assert int(tab.run("document.querySelector('#job-rows [role=progressbar]').ariaValueNow")) == round(100 * share)


def test_a_recording_replays_at_any_point(
    tab: Tab, pages: LivePages, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    recording = write_recording(tmp_path / "run.jsonl", events)
    tab.open(f"{pages.url}/?replay")
    tab.wait(IS_STATE.format("replay"))
    assert pages.keys == []  # it does not listen
    tab.choose_file("#file", recording)
    tab.wait("document.getElementById('play').textContent === 'Pause'")
    click(tab, "#play")
    for position in (70, 20, len(events) - 1):
        seconds = events[position]["time"] - events[0]["time"] + 0.01
        tab.run(
            f"(() => {{ const scrub = document.getElementById('scrub'); scrub.value = {1000 * seconds};"
            " scrub.dispatchEvent(new Event('input')); })()"
        )
        replica = events[position]["replicas"][0]
        assert text_of(tab, "#running") == str(replica["running"])
        forecast = replica["forecast"]
        times = [step * replica["step_seconds"] for step in forecast["steps"]]
        assert_drawn(drawn(tab, "path.forecast"), times, forecast["blocks"])
    # plays to the end, fast
    tab.run("document.getElementById('speed').value = '60'")
    tab.run("document.getElementById('speed').dispatchEvent(new Event('change'))")
    click(tab, "#play")
    tab.wait("document.getElementById('scrub').value === document.getElementById('scrub').max")
    tab.wait("document.getElementById('play').textContent === 'Play'")
    (tmp_path / "other.txt").write_text("nothing of ours\n")
    tab.choose_file("#file", tmp_path / "other.txt")
    tab.wait("!document.getElementById('notice').hidden")
    assert text_of(tab, "#notice") == "other.txt cannot be replayed: it has no events of /live."
    click(tab, "#close-replay")
    tab.wait(IS_LIVE)
    assert pages.keys == [None]


def test_the_page_saved_as_a_file_replays_without_a_server(
    tab: Tab, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_bytes(read_live_page())
    tab.open((tmp_path / "page.html").as_uri())
    tab.wait(IS_STATE.format("replay"))
    tab.choose_file("#file", write_recording(tmp_path / "run.jsonl", events))
    tab.wait(f"document.getElementById('running').textContent === '{events[0]['replicas'][0]['running']}'")
    assert tab.hosts() == set()


def test_a_key_is_asked_for_sent_and_forgotten(tab: Tab, pages: LivePages) -> None:
    pages.key = "s3cret"
    tab.expected = r"status of 401"
    tab.open(pages.url)
    tab.wait("document.getElementById('key-dialog').open")
    for given in ("wrong", "s3cret"):
        tab.wait("document.activeElement.id === 'key'")
        tab.send("Input.insertText", text=given)
        tab.press("Enter")
        tab.wait(f"{IS_LIVE} || document.getElementById('key-why').textContent.includes('refused')")
    tab.wait(IS_LIVE)
    assert pages.keys == [None, "Bearer wrong", "Bearer s3cret"]
    assert tab.run("[localStorage.length, document.cookie]") == [0, ""]
    tab.open(pages.url)  # the tab remembers it
    tab.wait(IS_LIVE)
    assert pages.keys[3:] == ["Bearer s3cret"]
    click(tab, "#forget")
    tab.wait("document.getElementById('key-dialog').open")
    assert pages.keys[4:] == [None]
    assert tab.run("sessionStorage.length") == 0


def test_a_page_that_was_just_opened_shows_the_past(tab: Tab, pages: LivePages) -> None:
    """Ten minutes of work that ended five minutes ago; meanwhile, the manager was started again, which is a gap."""
    times = [1_000.0 + 5 * number for number in range(180)]
    used = [300 + number if time < 1_600 else 0 for number, time in enumerate(times)]
    past = [moment(time, blocks, restarts=int(time >= 1_300)) for time, blocks in zip(times, used, strict=True)]
    pages.events = [idle(1_896.0, restarts=1, past=past)]
    tab.open(pages.url)
    tab.wait("document.getElementById('next-what').textContent === 'Idle.'")
    points = drawn(tab, "path.edge-used")
    assert [time for time, _ in points] == pytest.approx([time - 1_896 for time in [*times, 1_896]], abs=1.5)
    assert [blocks for _, blocks in points] == pytest.approx([*used, 0], abs=4)
    line = tab.run("document.querySelector('#pool-plot path.edge-used').getAttribute('d')")
    assert line.count("M") == 2, "one gap"
    assert tab.run("document.querySelector('#pool-plot path.area-used').getAttribute('d')").count("Z") == 2
    marks = "document.querySelector('#pool-plot path.mark.{}').getAttribute('d').split('M').length - 1"
    assert [tab.run(marks.format(name)) for name in ("preempted", "failed")] == [181, 8]
    notes = tab.run("[...document.querySelectorAll('#pool-plot text.tick')].slice(-7).map((one) => one.textContent)")
    assert [notes[place] for place in (0, 2, 4, 6)] == ["\N{GREATER-THAN OR EQUAL TO} 0", "181", "362", "8"]
    assert tab.run("document.querySelector('#strip-generated path.line-own').getAttribute('d')").count("L") > 170
    tab.run("document.getElementById('pool-plot').focus()")
    assert "own 0" in text_of(tab, "#pool-legend")
    tab.press("Home")
    assert tab.run("document.getElementById('pool-plot').ariaValueText") == "\N{MINUS SIGN}15 min: not known"
    for _ in range(2):
        tab.press("ArrowRight")
    assert re.match(
        r".14 min.*: in use 30\d, cached 100, free", tab.run("document.getElementById('pool-plot').ariaValueText")
    )
    assert re.search(r"in use 30\d", text_of(tab, "#pool-legend"))
    assert "own" not in text_of(tab, "#pool-legend")


@pytest.mark.parametrize("ended", [None, "it was stopped (SIGTERM or Ctrl-C)"])
def test_figures_of_a_server_that_is_gone_say_so_until_it_is_back(
    tab: Tab, pages: LivePages, ended: str | None
) -> None:
    pages.events = [idle(1_000.0), idle(1_001.0, server={"model": "small", "ended": ended})]
    pages.ends_after, pages.interval_s = 2, 0.1
    tab.set_media(prefers_color_scheme="dark")
    tab.open(pages.url)
    tab.wait("!document.getElementById('lost').hidden")
    text, title = text_of(tab, "#lost"), tab.run("document.title")
    if ended is None:
        found = re.fullmatch(
            r"No answer since (\d\d:\d\d:\d\d): the connection ended\. The figures are those of that time\.", text
        )
        assert found, text
        assert title == f"No answer since {found[1]} – small – tokasaurus"
    else:
        assert re.fullmatch(r"Server ended at [\d:]{8}: it was stopped \(SIGTERM or Ctrl-C\)\. The figures .*", text), (
            text
        )
        assert re.fullmatch(r"Server ended at [\d:]{8} – small – tokasaurus", title), title
    filter_of = "getComputedStyle(document.getElementById('main')).filter"
    assert tab.run(filter_of) == "grayscale(1)"
    assert text_of(tab, "#next-what") == "Idle.", "the figures stay"
    # a visitor of another tab sees the title alone
    pages.ends_after, pages.events = None, [idle(1_010.0, past=[moment(1_000.5, 7), moment(1_006.5, 7)])]
    tab.wait(IS_LIVE)
    tab.wait(f"{filter_of} === 'none'")
    assert tab.run("[document.title, document.getElementById('lost').hidden]") == ["small – tokasaurus", True]
    assert len(drawn(tab, "path.edge-used")) == 4, "its own past, one moment of the server's, and now"


def test_a_server_that_was_never_there_is_said(tab: Tab, pages: LivePages) -> None:
    pages.status = 503
    tab.expected = r"status of 503"
    tab.open(pages.url)
    tab.wait("!document.getElementById('lost').hidden")
    assert text_of(tab, "#lost") == "No answer: not now."
    assert tab.run("document.title") == "No answer – tokasaurus"


def test_keys_have_a_table_if_there_are_several(tab: Tab, pages: LivePages) -> None:
    tokens = {"prompt": 1_200, "generated": 34}
    keys = [
        {"name": "<b>alice</b>", "running": 3, "waiting": 1_000, "tokens": tokens},
        {"name": None, "running": 1, "waiting": 0, "tokens": {"prompt": 0, "generated": 0}},
    ]
    pages.events = [idle(1_000.0, keys=keys)]
    tab.open(pages.url)
    tab.wait("!document.getElementById('keys').hidden")
    cells = tab.run("[...document.querySelectorAll('#key-rows td')].map((cell) => cell.innerText)")
    assert cells == ["<b>alice</b>", "3", "1,000", "1,200", "34", "others, such as batches", "1", "0", "0", "0"]
    pages.events = [idle(1_000.0, keys=[])]
    tab.open(pages.url)
    tab.wait("document.getElementById('next-what').textContent === 'Idle.'")
    assert tab.run("document.getElementById('keys').hidden")


def test_a_job_has_the_name_of_its_file_in_place_of_its_id(tab: Tab, pages: LivePages) -> None:
    job = {
        "id": "batch_1",
        "kind": "batch",
        "name": "in.jsonl",
        "state": "failed",
        "ended": 400.0,
        "reason": "line 2: no" + 40 * " word",
        "tokens_per_second": 0.0,
    }
    pages.events = [idle(1_000.0, jobs=[job | {"lines": {"total": 2, "done": 0, "failed": 0, "running": 0}}])]
    tab.open(pages.url)
    tab.wait("document.querySelector('#job-rows li') !== null")
    shown = text_of(tab, "#job-rows li")
    assert shown.split("\n")[:2] == ["in.jsonl", "batch · failed · 0 % · 10 min ago"]
    assert "line 2: no" in shown
    assert "batch_1" not in shown
    assert "tokens/s" not in shown, "it has ended"
    whole = "(() => { const at = document.querySelector('.reason'); return at.scrollWidth <= at.clientWidth; })()"
    assert tab.run(whole), "not cut off, however long"


def test_words_are_explained_by_keys_and_by_touch(tab: Tab, pages: LivePages) -> None:
    pages.events = [idle(1_000.0)]
    tab.open(pages.url)
    tab.wait(IS_LIVE)
    opened = "document.querySelector('.words:popover-open')?.innerText ?? ''"
    tab.run("document.querySelector('.pool .terms').focus()")
    tab.press("Enter")
    assert "cached block\na block of a prefix that no sequence uses" in tab.run(opened)
    tab.press("Escape")
    assert tab.run(opened) == ""
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "Words of the KV pool"
    tab.set_size(390, 844)
    tab.run("document.querySelector('.strips .terms').scrollIntoView()")
    place = "document.querySelector('.strips .terms').getBoundingClientRect()"
    x, y = tab.run(f"[{place}.x, {place}.y]")
    tab.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x + 5, "y": y + 5}])
    tab.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.wait(f"({opened}).includes('steps in flight')")


@pytest.mark.long
def test_a_lost_connection_is_made_again(tab: Tab, pages: LivePages, events: list[dict[str, Any]]) -> None:
    pages.ends_after = 30
    tab.open(pages.url)
    tab.wait(IS_STATE.format("reconnecting"))
    assert "reconnecting in" in text_of(tab, "#state-text")
    pages.ends_after = None
    pages.events = events[30:60]
    tab.wait(f"document.getElementById('running').textContent === '{events[59]['replicas'][0]['running']}'")
    tab.wait(IS_LIVE)
    # the history goes on
    assert len(drawn(tab, "path.edge-used")) == 60


@pytest.mark.long
def test_what_refuses_is_said(tab: Tab, pages: LivePages) -> None:
    pages.status = 403
    tab.expected = r"status of 403"
    tab.open(pages.url)
    tab.wait(IS_STATE.format("refused"))
    assert text_of(tab, "#notice") == "The server refuses the figures: not now."
    pages.status = 200
    click(tab, "#try")
    tab.wait(IS_LIVE)
    assert tab.run("document.getElementById('notice').hidden")


@pytest.mark.long
def test_a_hidden_tab_keeps_the_history_and_draws_when_it_is_seen(
    tab: Tab, pages: LivePages, events: list[dict[str, Any]]
) -> None:
    """Headless Chromium has no hidden tabs: the page is told that it is one."""
    hide = "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }});"
    tab.send("Page.addScriptToEvaluateOnNewDocument", source=hide.format("true"))
    tab.open(pages.url)
    tab.wait(IS_LIVE)
    tab.wait("performance.now() > 1500")
    assert text_of(tab, "#running") == "–"
    tab.run(f"{hide.format('false')} document.dispatchEvent(new Event('visibilitychange'));")
    tab.wait(f"document.getElementById('running').textContent === '{events[-1]['replicas'][0]['running']}'")
    assert len(drawn(tab, "path.edge-used")) == len(events)


@pytest.mark.long
def test_several_replicas_are_summed_or_chosen(tab: Tab, pages: LivePages) -> None:
    pages.events = simulated_events(28, num_replicas=3, seed=2, restart_at=20)
    replicas = pages.events[-1]["replicas"]
    tab.open(pages.url)
    total = sum(one["running"] for one in replicas)
    tab.wait(f"document.getElementById('running').textContent === '{total}'")
    rows = tab.run("[...document.querySelectorAll('#replica-rows tr')].map((row) => row.innerText.split('\\t')[3])")
    assert rows == [str(one["running"]) for one in replicas]
    for index in (0, 2):
        tab.run(f"document.getElementById('replica').value = '{index}'")
        tab.run("document.getElementById('replica').dispatchEvent(new Event('change'))")
        assert text_of(tab, "#running") == str(replicas[index]["running"])
        forecast = replicas[index]["forecast"]
        assert [value for _, value in drawn(tab, "path.forecast")] == pytest.approx(forecast["blocks"], abs=0.6)


def test_an_idle_server_and_events_with_little_in_them_are_shown(tab: Tab, pages: LivePages) -> None:
    pages.events = [
        {"format": 1, "time": 1.0},
        {"format": 1, "time": 2.0, "replicas": [{"index": 0, "running": 0, "waiting": 0, "forecast": None}]},
    ]
    tab.open(pages.url)
    tab.wait("document.getElementById('next-what').textContent === 'Idle.'")
    assert [text_of(tab, f"#{name}") for name in ("running", "pool", "eta")] == ["0", "–", "–"]


@pytest.mark.long
def test_keys_move_the_time_cursor_and_say_its_figures(
    tab: Tab, pages: LivePages, events: list[dict[str, Any]]
) -> None:
    tab.open(pages.url)
    last = events[-1]["replicas"][0]
    tab.wait(f"document.getElementById('running').textContent === '{last['running']}'")
    value = "document.getElementById('pool-plot').ariaValueText"
    tab.run("document.getElementById('pool-plot').focus()")
    assert tab.run(value).startswith(f"now: own {last['blocks']['own']:,}, shared")
    tab.press("Home")
    assert tab.run(value)[1:].startswith("2 min: ")
    tab.press("End")
    assert re.match(r"\+\d+ s: forecast 0", tab.run(value))
    assert tab.run("document.querySelectorAll('line.cursor').length") >= 1
    tab.press("Escape")
    assert tab.run("document.querySelectorAll('line.cursor').length") == 0
    click(tab, "#tables")
    rows = tab.run("[...document.querySelectorAll('#pool-table tbody tr')].map((row) => row.innerText.split('\\t'))")
    (row,) = [row for row in rows if row[0] == "now" and row[1] != "–"]
    assert row[1] == f"{last['blocks']['own']:,}"


@pytest.mark.long
def test_the_theme_follows_the_system_until_it_is_chosen(tab: Tab, pages: LivePages) -> None:
    color = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    tab.set_media(prefers_color_scheme="light")
    tab.open(pages.url)
    light = tab.run(color)
    tab.set_media(prefers_color_scheme="dark")
    dark = tab.run(color)
    assert light != dark
    click(tab, "#theme")
    assert tab.run(color) == light
    tab.open(pages.url)
    assert tab.run(color) == light
    click(tab, "#theme")
    assert tab.run(f"[{color}, localStorage.length]") == [dark, 0]


def test_the_oldest_requests_are_in_a_table_while_there_are_any(tab: Tab, pages: LivePages) -> None:
    oldest = {"id": "cmpl-1", "client": "<b>alice</b>", "state": "running", "samples": 4, "running": 3}
    oldest |= {"prompt_tokens": 90, "generated_tokens": 1200, "age_seconds": 12.2, "wait_seconds": 0.5}
    pages.events = [{"format": 1, "time": 2.0, "replicas": [{"index": 0, "running": 3, "oldest": [oldest]}]}]
    tab.open(pages.url)
    tab.wait("!document.getElementById('oldest').hidden")
    cells = tab.run("[...document.querySelectorAll('#oldest-rows td')].map((cell) => cell.innerText)")
    assert cells[:6] == ["cmpl-1", "<b>alice</b>", "running", "3 of 4", "90", "1,200"]


@pytest.mark.parametrize(("peak", "is_near"), [(600, False), (1_380, True), (1_700, True)])
def test_the_pools_limit_is_red_only_when_it_is_near(tab: Tab, pages: LivePages, peak: int, is_near: bool) -> None:
    event = {
        "format": 1,
        "time": 2.0,
        "replicas": [
            {
                "index": 0,
                "running": 1,
                "step_seconds": 0.1,
                "blocks": {"own": 450, "shared": 0, "cached": 900, "free": 150, "total": 1_500},
                "forecast": {"steps": [0, 5, 9], "blocks": [450, peak, 0], "limit": 1_500},
            }
        ],
    }
    pages.events = [event]
    tab.open(pages.url)
    tab.wait("document.querySelector('#pool-plot svg text.limit') !== null")
    assert tab.run("document.querySelector('#pool-plot svg line.limit').classList.contains('near')") is is_near
    assert tab.run("document.querySelector('#pool-plot svg text.limit').classList.contains('near')") is is_near


def test_all_that_can_be_used_is_reached_by_tab_alone_and_seen_there(tab: Tab, pages: LivePages) -> None:
    pages.events = simulated_events(12, num_replicas=2)
    keys = [{"name": "alice", "running": 1, "waiting": 0, "tokens": {"prompt": 1, "generated": 2}}]
    pages.events[-1]["keys"] = keys
    pages.ends_after = len(pages.events)  # with the button of a lost connection
    tab.open(pages.url)
    tab.wait("!document.getElementById('lost').hidden && !document.getElementById('keys').hidden")
    pages.status = 503
    tab.expected = r"status of 503"
    usable = (
        "[...document.querySelectorAll('a[href], button, select, input, [tabindex]')]"
        ".filter((one) => one.checkVisibility() && !one.matches('.skip'))"
    )
    expected = tab.run(f"{usable}.length")
    tab.run(f"window.unreached = new Set({usable})")
    for _ in range(expected + 5):
        tab.press("Tab")
        seen = "document.activeElement.matches('body, .skip') || getComputedStyle(document.activeElement).outlineStyle"
        assert tab.run(seen) in (True, "solid"), "the focus is seen"
        tab.run("unreached.delete(document.activeElement)")
    assert tab.run("[...unreached].map((one) => one.outerHTML)") == []
    assert expected > 20


@pytest.mark.parametrize("width", [320, *(pytest.param(width, marks=pytest.mark.long) for width in (390, 768, 1280))])
def test_nothing_is_wider_than_the_window(tab: Tab, pages: LivePages, width: int) -> None:
    pages.events = simulated_events(30, num_replicas=2, seed=5)
    tab.set_size(width, 800)
    tab.open(pages.url)
    tab.wait("document.querySelectorAll('#replica-rows tr').length === 2")
    assert tab.run("document.documentElement.scrollWidth") == width
