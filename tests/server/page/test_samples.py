"""What the page computes from events: compared with slow computations in Python."""

import random
from typing import Any

import numpy as np
import pytest

from tests.server.page.helpers.node import NODE, in_node
from tests.server.page.helpers.recordings import simulated_events
from tokasaurus.messages.status import TimeLeft
from tokasaurus.monitoring.progress import show_left

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")

GAUGES = {"running": ("running",), "waiting": ("waiting",), "own": ("blocks", "own"), "evicted": ("events", "evicted")}
TOTALS = ("generated", "prompt")
GAP_S = 5
PAST_S = 5
PAST_GAP_S = 11


def value_of(replica: dict[str, Any], *names: str) -> Any:
    for name in names:
        replica = replica.get(name, {}) if isinstance(replica, dict) else {}
    return replica if isinstance(replica, int | float) else None


def random_history(seed: int) -> list[dict[str, Any]]:
    """Events at odd times; replicas come, go and start again, and any key may be absent. Some are of the server's own
    past."""
    rng = random.Random(seed)
    totals = [dict.fromkeys(TOTALS, 0) for _ in range(3)]
    restarts = [0, 0, 0]
    now, failed, history = 1000.0, 0, []
    for _ in range(rng.randint(1, 60)):
        now += rng.choice((0.9, 1.0, 1.1, 7.5, 12.0))
        failed += rng.choice((0, 0, 3))
        replicas = []
        for index, counted in enumerate(totals):
            restarts[index] += rng.random() < 0.05
            for name in TOTALS:
                counted[name] = 0 if rng.random() < 0.05 else counted[name] + rng.randint(0, 500)
            replica: dict[str, Any] = {
                "index": index,
                "restarts": restarts[index],
                "running": rng.randint(0, 9),
                "waiting": rng.randint(0, 9),
                "blocks": {"own": rng.randint(0, 99), "shared": rng.randint(0, 9)},
                "events": {"evicted": rng.randint(0, 3)},
                "tokens": dict(counted),
            }
            for name in list(replica):
                if name not in ("index", "restarts") and rng.random() < 0.1:
                    del replica[name]
            if rng.random() < 0.9:
                replicas.append(replica)
        event: dict[str, Any] = {"format": 1, "time": now, "replicas": replicas}
        if rng.random() < 0.8:
            event["requests"] = {"failed": failed}
        if rng.random() < 0.3:
            event["isPast"] = True
        history.append(event)
    return history


def slow_series(history: list[dict[str, Any]], chosen: int | None) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in ("time", "isAfterGap", "failed", *GAUGES, *TOTALS)}
    for position, event in enumerate(history):
        earlier = history[position - 1] if position else None
        replicas = [one for one in event["replicas"] if chosen in (None, one["index"])]
        columns["time"].append(event["time"])
        longest = PAST_GAP_S if {"isPast"} & ({*event} | {*(earlier or ())}) else GAP_S
        is_paused = earlier is None or event["time"] - earlier["time"] > longest
        old = {one["index"]: one["restarts"] for one in (earlier or event)["replicas"]}
        is_new = any(old.get(one["index"], one["restarts"]) != one["restarts"] for one in replicas)
        columns["isAfterGap"].append(is_paused or is_new)
        numbers = [value_of(one or {}, "requests", "failed") for one in (earlier, event)]
        columns["failed"].append(None if None in numbers else numbers[1] - numbers[0])
        for name, path in GAUGES.items():
            known = [value for one in replicas if (value := value_of(one, *path)) is not None]
            columns[name].append(sum(known) if known else None)
        for name in TOTALS:
            grown = []
            for one in replicas:
                before = next((old for old in (earlier or event)["replicas"] if old["index"] == one["index"]), {})
                then, now = value_of(before, "tokens", name), value_of(one, "tokens", name)
                if earlier is not None and then is not None and now is not None:
                    grown.append(now - then if now >= then else now)
            seconds = event["time"] - earlier["time"] if earlier is not None else 1
            columns[name].append(sum(grown) / seconds if grown else None)
    return columns


def test_series_have_rates_of_totals_that_may_start_again_and_sums_over_replicas() -> None:
    cases = [(random_history(seed), chosen) for seed in range(40) for chosen in (None, 0, 2)]
    found = in_node("samples.mjs", "data.map(([history, chosen]) => m.seriesOf(history, chosen))", cases)
    for (history, chosen), series in zip(cases, found, strict=True):
        expected = slow_series(history, chosen)
        for name, values in expected.items():
            numbers = [value is None for value in values]
            assert [value is None for value in series[name]] == numbers, name
            assert [value for value in series[name] if value is not None] == pytest.approx(
                [value for value in values if value is not None]
            ), name


def forecast_at(replica: dict[str, Any], seconds: float) -> float:
    forecast = replica["forecast"]
    if forecast is None or seconds > forecast["steps"][-1] * replica["step_seconds"]:
        return 0.0
    times = [step * replica["step_seconds"] for step in forecast["steps"]]
    return float(np.interp(seconds, times, forecast["blocks"]))


@pytest.mark.parametrize("chosen", [None, 1])
def test_a_forecast_is_the_sum_of_its_replicas_over_seconds(chosen: int | None) -> None:
    events = simulated_events(24, num_replicas=3, seed=3)
    curves = in_node(
        "samples.mjs", "data.events.map((one) => m.forecastOf(one, data.chosen))", {"events": events, "chosen": chosen}
    )
    assert sum(curve is not None for curve in curves) > 20
    for event, curve in zip(events, curves, strict=True):
        replicas = [one for one in event["replicas"] if chosen in (None, one["index"])]
        if all(one["forecast"] is None for one in replicas):
            assert curve is None
            continue
        expected = [sum(forecast_at(one, seconds) for one in replicas) for seconds in curve["seconds"]]
        assert curve["blocks"] == pytest.approx(expected)
        assert curve["peak"] == pytest.approx(max(expected))
        assert curve["blocks"][curve["seconds"].index(curve["peakSeconds"])] == curve["peak"]
        assert curve["seconds"] == sorted(curve["seconds"])
        assert curve["limit"] == sum(one["blocks"]["total"] for one in replicas)
        ends = [one["forecast"]["steps"][-1] * one["step_seconds"] for one in replicas if one["forecast"]]
        assert curve["seconds"][-1] == pytest.approx(max(ends))


@pytest.mark.parametrize("chosen", [None, 1])
def test_the_oldest_requests_of_all_replicas_are_those_that_run_and_then_those_that_wait(chosen: int | None) -> None:
    rng = random.Random(0)
    replicas: list[dict[str, Any]] = [
        {
            "index": index,
            "oldest": [
                {"id": f"{index}-{number}", "state": state, "age_seconds": rng.random()}
                for number, state in enumerate(["running"] * 4 + ["prefilling"] * 3 + ["waiting"] * 8)
            ],
        }
        for index in range(3)
    ]
    event = {"time": 1.0, "replicas": [*replicas, {"index": 3, "state": "down"}]}
    found = in_node("samples.mjs", "m.oldestRequests(data.event, data.chosen)", {"event": event, "chosen": chosen})
    told = [one for replica in replicas for one in replica["oldest"] if chosen in (None, replica["index"])]
    ordered = sorted(told, key=lambda one: -one["age_seconds"])
    running, waiting = ([one for one in ordered if (one["state"] == "waiting") is waits] for waits in (False, True))
    assert found == running[:8] + waiting[:8]
    assert in_node("samples.mjs", "m.oldestRequests(data, null)", {"time": 1.0}) == []


def test_the_forecast_of_a_minute_ago_begins_a_minute_before_the_last_event() -> None:
    events = simulated_events(90, seed=4)
    histories = [events[:length] for length in (1, 40, 56, 62, 75, 90)]
    curves = in_node("samples.mjs", "data.map((history) => m.earlierForecast(history, null))", histories)
    assert [curve is None for curve in curves] == [True, True, False, False, False, False]
    for history, curve in zip(histories[2:], curves[2:], strict=True):
        now = history[-1]["time"]
        made = min(history, key=lambda event: abs(now - 60 - event["time"]))
        (replica,) = made["replicas"]
        expected = [step * replica["step_seconds"] + made["time"] - now for step in replica["forecast"]["steps"]]
        assert curve["seconds"] == pytest.approx(expected)
        assert curve["blocks"] == replica["forecast"]["blocks"]


def test_a_curve_is_linear_between_its_points_and_0_after_them() -> None:
    curve = {"seconds": [-3, 0, 2.5, 4], "blocks": [10, 7, 9, 1]}
    times = [-4, -3, -1, 0, 1, 2.5, 3.9, 4, 4.1]
    expected = [None, *np.interp(times[1:-1], curve["seconds"], curve["blocks"]), 0]
    assert in_node(
        "samples.mjs", "data.times.map((time) => m.valueAt(data.curve, time))", {"curve": curve, "times": times}
    ) == [None if value is None else pytest.approx(value) for value in expected]


def test_a_history_is_bounded_and_starts_again_when_the_clock_is_set_back() -> None:
    expression = (
        "data.map((times) => times.reduce((kept, time) => m.appendSample(kept, { time }), []).map((one) => one.time))"
    )
    seconds = [float(second) for second in range(2000)]
    quick = [0.1 * position for position in range(3000)]
    back = [*seconds[:50], 10.0, 11.0]
    kept = in_node("samples.mjs", expression, [seconds, quick, back])
    assert kept == [seconds[-901:], quick[-1000:], [10.0, 11.0]]


def slow_history(own: list[float], past: list[float], now: float) -> list[float]:
    """Times of the events with the past where nothing of their own is within five seconds, for 15 minutes."""
    kept = {time for time in past if time < now and not any(abs(time - other) < PAST_S for other in own)}
    return [time for time in sorted({*own, *kept}) if time >= now - 900] + [now]


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_later_has_the_servers_past_where_it_has_none_of_its_own(seed: int) -> None:
    """A page that was just opened, and one that had lost the connection for a while."""
    rng = random.Random(seed)
    cases = []
    for _ in range(30):
        now = 5000.0 + rng.random()
        start, end = sorted(rng.uniform(now - 1100, now - 0.5) for _ in range(2))
        own = [start + second for second in range(int(end - start))] if rng.random() < 0.7 else []
        past = [now - 4 - PAST_S * number for number in range(rng.choice((0, 1, 180)))][::-1]
        cases.append((own, past, now))
    expression = (
        "data.map(([own, past, now]) => m.appendSample(own.map((time) => ({ time })),"
        " { time: now, past: past.map((time) => ({ time })) }))"
    )
    for (own, past, now), history in zip(cases, in_node("samples.mjs", expression, cases), strict=True):
        assert [one["time"] for one in history] == pytest.approx(slow_history(own, past, now))
        assert [one["time"] for one in history if one.get("isPast")] == pytest.approx(
            [time for time in slow_history(own, past, now) if time in past]
        )
        assert not any("past" in one for one in history)


def test_after_the_clock_was_set_back_there_is_the_past_of_the_new_clock() -> None:
    event = {"time": 50.0, "past": [{"time": 45.0}, {"time": 55.0}]}
    found = in_node("samples.mjs", "m.appendSample([{ time: 70 }], data)", event)
    assert [one["time"] for one in found] == [45.0, 50.0]


def test_charts_show_all_of_the_past_while_nothing_runs() -> None:
    def history(span: int, runs: bool) -> list[dict[str, Any]]:
        forecast = {"steps": [0, 10], "blocks": [3, 0], "limit": 9}
        past = [{"time": 5.0 * number, "isPast": True, "replicas": [{"index": 0}]} for number in range(span // 5)]
        now = {"index": 0, "step_seconds": 0.1, "forecast": forecast if runs else None}
        return [*past, {"time": float(span), "replicas": [now]}]

    cases = [(history(span, runs), chosen) for span in (5, 400, 890) for runs in (True, False) for chosen in (None, 60)]
    spans = in_node("samples.mjs", "data.map(([history, chosen]) => m.timeWindow(history, null, chosen).past)", cases)
    assert spans == [120, 60, 120, 60, 120, 60, 600, 60, 120, 60, 900, 60]


@pytest.mark.parametrize("seconds", [1, 5])
def test_the_large_figures_are_means_of_the_last_seconds_or_the_last_value(seconds: int) -> None:
    rng = random.Random(seconds)
    times = [float(time) for time in range(0, 100, 5)] + [95.0 + number + rng.uniform(-0.02, 0.02) for number in (1, 2)]
    values = [rng.choice((None, float(rng.randint(0, 9)))) for _ in times]
    series = [{"time": times[:end], "x": values[:end]} for end in range(1, len(times) + 1)]
    found = in_node("samples.mjs", f"data.map((one) => m.recentMean(one, 'x', {seconds}))", series)
    for end, mean in enumerate(found, start=1):
        shown = {position for position in range(end) if times[position] > times[end - 1] - seconds + 0.5} | {end - 1}
        known = [value for position in shown if (value := values[position]) is not None]
        assert mean == (pytest.approx(np.mean(known)) if known else None)


def test_keys_are_listed_with_the_others_if_these_have_anything() -> None:
    keys = [{"name": "a", "running": 0}, {"name": None, "running": 0, "tokens": {"prompt": 0, "generated": 0}}]
    busy = [keys[0], {**keys[1], "waiting": 1}]
    found = in_node("samples.mjs", "data.map((keys) => m.keysOf({ keys }))", [keys, busy, None])
    assert found == [keys[:1], busy, []]


def test_what_an_event_leaves_out_is_as_before_for_five_seconds() -> None:
    """The manager of a replica may be too busy for a sample in this second."""
    full: dict[str, Any] = {
        "index": 0,
        "restarts": 0,
        "running": 3,
        "step_seconds": 0.5,
        "blocks": {"total": 9, "own": 4, "shared": 0},
    }
    full["forecast"] = {"steps": [0, 4, 20], "blocks": [4, 8, 0], "limit": 9}
    bare = {"index": 0, "restarts": 0, "running": 5}
    events = [{"time": 10.0, "replicas": [full]}]
    events += [{"time": 10.0 + age, "replicas": [bare]} for age in range(1, 8)]
    restarted = [events[0], {"time": 11.0, "replicas": [bare | {"restarts": 1}]}]
    grown, other = in_node(
        "samples.mjs",
        "data.map((events) => events.reduce((history, one) => m.appendSample(history, one), [])"
        ".map((one) => [one.replicas[0].running, one.replicas[0].blocks ?? null, m.forecastOf(one, null)]))",
        [events, restarted],
    )
    assert [running for running, _, _ in grown] == [3, *[5] * 7]
    assert [blocks is not None for _, blocks, _ in grown] == [True] * 6 + [False] * 2
    assert [forecast and (forecast["seconds"], forecast["blocks"]) for _, _, forecast in grown] == [
        ([0, 2, 10], [4, 8, 0]),
        ([0, 1, 9], [6, 8, 0]),
        ([0, 8], [8, 0]),
        ([0, 7], [7, 0]),
        ([0, 6], [6, 0]),
        ([0, 5], [5, 0]),
        None,
        None,
    ]
    assert other[1] == [5, None, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"next": None}, "Nothing waits. All sequences run."),
        ({"next": None, "running": 0}, "Idle. Nothing runs and nothing waits."),
        ({"next": None, "running": None}, "Not known yet. "),
        ({"next": None, "waiting": 1}, "1 sequence waits. All that wait, wait for grammars."),
        (
            {},
            "Next in the queue fits in 61 steps, in 2.4 s (+310 blocks). "
            "It waits for KV blocks; 900 prompt tokens, queued for 3.2 s.",
        ),
        (
            {"fits_in_steps": None},
            "Next in the queue does not fit within the forecast (+310 blocks). "
            "It waits for KV blocks; 900 prompt tokens, queued for 3.2 s.",
        ),
        (
            {"blocked_by": None, "fits_in_steps": 0},
            "Next in the queue starts now (+310 blocks). Nothing blocks it; 900 prompt tokens, queued for 3.2 s.",
        ),
        (
            {"blocked_by": "slots", "fits_in_steps": 1, "blocks": 1},
            "Next in the queue fits in 1 step, in 40 ms (+1 block). "
            "All 1,024 slots are taken; 900 prompt tokens, queued for 3.2 s.",
        ),
        (
            {"blocked_by": "paused", "prompt_tokens": None},
            "Next in the queue waits until admission resumes (+310 blocks). The replica is paused; queued for 3.2 s.",
        ),
        (
            {"blocked_by": "a new reason", "step_seconds": None, "wait_seconds": None},
            "Next in the queue fits in 61 steps (+310 blocks). It waits; 900 prompt tokens.",
        ),
    ],
)
def test_a_sentence_says_when_the_next_sequence_starts_and_why(changes: dict[str, Any], expected: str) -> None:
    upcoming = {"fits_in_steps": 61, "blocks": 310, "prompt_tokens": 900, "wait_seconds": 3.2, "blocked_by": "blocks"}
    replica = {"index": 0, "running": 5, "waiting": 0, "slots": 1024, "step_seconds": 0.04, "next": upcoming}
    for name, value in changes.items():
        (replica if name in replica else upcoming)[name] = value
    sentences = in_node("samples.mjs", "m.nextSentences(data, null)", {"time": 0, "replicas": [replica]})
    assert " ".join(sentences) == expected


def test_no_sentence_says_that_nothing_waits_while_the_manager_has_not_told_what_for() -> None:
    sample = {"time": 0, "replicas": [{"index": 0, "running": 5, "waiting": 2}]}
    assert in_node("samples.mjs", "m.nextSentences(data, null)", sample) == [
        "2 sequences wait.",
        "What for is not known yet.",
    ]


def test_of_several_replicas_the_sentence_is_about_the_longest_wait() -> None:
    replicas = [
        {"index": index, "next": {"fits_in_steps": index, "blocked_by": "blocks", "wait_seconds": wait}}
        for index, wait in enumerate((1.0, 9.0, 3.0))
    ]
    (what, _), (alone, _) = in_node(
        "samples.mjs", "[null, 2].map((chosen) => m.nextSentences(data, chosen))", {"time": 0, "replicas": replicas}
    )
    assert what == "Next in the queue on replica 1 fits in 1 step."
    assert alone == "Next in the queue fits in 2 steps."


def test_the_ratio_of_lengths_has_the_median_and_the_middle_80_percent() -> None:
    rng = random.Random(5)
    for number in (1, 2, 99):
        pairs = [[rng.randint(1, 500), rng.randint(1, 500)] for _ in range(number)]
        ratios = [actual / predicted for predicted, actual in pairs]
        low, median, high = np.quantile(ratios, [0.1, 0.5, 0.9])
        found = in_node("samples.mjs", "m.ratioSummary(data)", pairs)
        assert (found["low"], found["median"], found["high"]) == pytest.approx((low, median, high))
    assert in_node("samples.mjs", "m.ratioSummary(data)", []) is None


def test_parts_are_sums_over_the_last_seconds_by_step() -> None:
    events = simulated_events(40, num_replicas=2, seed=6)
    groups = in_node("samples.mjs", "m.partsOf(data, null, 15)", events)
    recent = [event for event in events if event["time"] > events[-1]["time"] - 15]
    replicas = [one for event in recent for one in event["replicas"]]
    steps = sum(one["steps"] for one in replicas)
    assert [group["name"] for group in groups] == ["manager", "device", "phases"]
    elapsed = 2 * (events[-1]["time"] - events[events.index(recent[0]) - 1]["time"])
    for group in groups:
        parts = {
            name: sum(one["parts"][group["name"]][name] for one in replicas)
            for name in replicas[0]["parts"][group["name"]]
        }
        total = sum(parts.values())
        assert group["perStep"] == pytest.approx(total / steps)
        assert {part["name"]: (part["perStep"], part["share"]) for part in group["parts"]} == {
            name: pytest.approx((value / steps, value / total)) for name, value in parts.items()
        }
        spent = {"manager": total, "device": parts.get("busy")}.get(group["name"])
        assert group["ofTime"] == (None if spent is None else pytest.approx(spent / elapsed))


def test_pipeline_stages_are_groups_of_their_own() -> None:
    stages = [{"busy": 0.5, "waiting": 0.25, "microbatches": 2}, {"busy": 0.75, "waiting": 0.0, "microbatches": 1}]
    replicas = [
        {"index": index, "steps": 5, "parts": {"device": {"busy": 0.9, "idle": 0.1}}, "stages": stages}
        for index in range(2)
    ]
    events = [{"time": float(time), "replicas": replicas} for time in range(3)]
    _, first, second = in_node("samples.mjs", "m.partsOf(data, null, 15)", events)
    assert [part["name"] for part in first["parts"]] == ["busy", "waiting"]
    assert (first["name"], first["ofTime"], first["perStep"]) == ("stage 1", 0.5, pytest.approx(0.15))
    assert (second["name"], second["ofTime"]) == ("stage 2", 0.75)
    assert in_node("samples.mjs", "m.microbatchesOf(data, null)", events[0]) == {"stage 1": 4, "stage 2": 2}
    assert in_node("samples.mjs", "m.microbatchesOf(data, 1)", events[0]) == {"stage 1": 2, "stage 2": 1}


def test_several_small_parts_become_others() -> None:
    manager = {"requests": 0.001, "admission": 0.5, "grouping": 0.0, "steps": 0.3, "results": 0.004}
    events = [
        {"time": time, "replicas": [{"index": 0, "steps": 2, "parts": {"manager": manager}}]} for time in (1.0, 2.0)
    ]
    (group,) = in_node("samples.mjs", "m.partsOf(data, null, 15)", events)
    assert [part["name"] for part in group["parts"]] == ["admission", "steps", "others"]
    assert [part["perStep"] for part in group["parts"]] == pytest.approx([0.25, 0.15, 0.0025])


def test_events_with_next_to_nothing_in_them_are_shown_as_unknown() -> None:
    """Readers tolerate absent keys; an event without replicas has no figures."""
    events = [{"format": 1, "time": 1.0}, {"format": 1, "time": 2.0, "replicas": [{"index": 0}]}]
    found = in_node(
        "samples.mjs",
        "({ series: m.seriesOf(data, null), forecast: m.forecastOf(data[1], null), parts: m.partsOf(data, null, 15),"
        " eta: m.etaOf(data[1], null), wait: m.oldestWait(data[1], null), cached: m.cachedShare(data, null),"
        " span: m.timeWindow(data, null, null), earlier: m.earlierForecast(data, null),"
        " pairs: m.lengthPairs(data, null) })",
        events,
    )
    series = found.pop("series")
    assert series.pop("time") == [1.0, 2.0]
    assert series.pop("isAfterGap") == [True, False]
    assert {name: values for name, values in series.items() if values != [None, None]} == {}
    assert found == {
        "forecast": None,
        "parts": [],
        "eta": None,
        "wait": None,
        "cached": None,
        "span": {"past": 120, "future": 30},
        "earlier": None,
        "pairs": [],
    }


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("duration", {0: "0 s", 0.0004: "1 ms", 0.25: "250 ms", 0.999: "1.0 s", 9.96: "10 s", 119.6: "2 min"}),
        ("duration", {125: "2 min 5 s", 7199: "119 min", 7260: "2 h 1 min", 90000: "25 h", 180000: "2 d 2 h"}),
        ("compact", {0: "0", 999.4: "999", 9999: "9,999", 12345: "12.3K", 2500000: "2.5M"}),
        ("speed", {0: "0", 0.04: "0.0", 9.94: "9.9", 9.96: "10", 1234.4: "1,234"}),
        ("percent", {0: "0 %", 0.004: "0.4 %", 0.0951: "10 %", 1: "100 %"}),
        ("milliseconds", {0.00004: "0.04 ms", 0.0012: "1.2 ms", 0.032: "32 ms", 2.5: "2,500 ms"}),
        ("price", {0: "0.0", 0.0361: "0.036", 1: "1.00", 123.4: "123"}),
    ],
)
def test_values_have_few_digits_and_a_unit(words: str, values: dict[float, str]) -> None:
    found = in_node("samples.mjs", f"[...data, null].map((value) => m.{words}(value))", list(values))
    assert found == [*values.values(), "–"]


def test_a_time_left_is_a_range_while_it_is_not_sure_as_everywhere() -> None:
    ranges = [(121, 242), (30, 90), (115, 130), (86_400, 300_000), (3600, 9000), (20, 61)]
    told = [{"eta_seconds": (low * high) ** 0.5, "eta_range": [low, high]} for low, high in ranges]
    found = in_node("samples.mjs", "data.map(m.timeLeft)", [*told, {"eta_seconds": 100.0}, {}])
    assert found == ["2–4 min", "30–90 s", "2 min 2 s", "1–3 d", "1–3 h", "20–61 s", "100 s", "–"]
    pythons = [show_left(TimeLeft(*ends)) for ends in ranges]
    assert [shown for shown in found[:6] if "–" in shown] == [shown for shown in pythons if "–" in shown]
