"""Figures that follow from samples, against slow and obvious computations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.top.helpers.scripted_samples import START_S, line, replica, sample
from tokasaurus.commands.top.history import Curve, History
from tokasaurus.commands.top.samples import read_sample


def history_of(samples: list[dict[str, Any]]) -> History:
    history = History()
    for value in samples:
        history.add(read_sample(line(value)))
    return history


@st.composite
def points(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Whole numbers: x ascending, with jumps."""
    gaps = draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    xs = [draw(st.integers(-20, 5))]
    for gap in gaps:
        xs.append(xs[-1] + gap)
    return xs, draw(st.lists(st.integers(0, 100), min_size=len(xs), max_size=len(xs)))


def slow_values(xs: list[int], ys: list[int], x: int) -> list[float]:
    """All values of the curve at a whole x: two or more at a jump, none outside."""
    found: list[float] = [y for own, y in zip(xs, ys, strict=True) if own == x]
    for number in range(len(xs) - 1):
        if xs[number] < x < xs[number + 1]:
            share = (x - xs[number]) / (xs[number + 1] - xs[number])
            found.append(ys[number] * (1 - share) + ys[number + 1] * share)
    return found


@given(points(), st.integers(-30, 60), st.integers(0, 30))
def test_the_highest_value_within_a_column_is_that_of_all_its_steps(
    curve: tuple[list[int], list[int]], start: int, width: int
) -> None:
    xs, ys = curve
    expected = [value for x in range(start, start + width + 1) for value in slow_values(xs, ys, x)]
    found = Curve(tuple(map(float, xs)), tuple(map(float, ys))).highest(start, start + width)
    assert found == (pytest.approx(max(expected)) if expected else None)


@st.composite
def lives_of_a_total(draw: st.DrawFn) -> list[tuple[float, bool, float, int]]:
    """(seconds since the sample before, whether the total began at 0 again, what was added since, restarts)."""
    steps = st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.booleans(), st.integers(0, 50).map(float), st.integers(0, 1))
    return draw(st.lists(steps, min_size=1, max_size=12))


@given(lives_of_a_total(), st.booleans())
def test_rates_count_every_token_once_over_restarts(
    life: list[tuple[float, bool, float, int]], tells_restarts: bool
) -> None:
    """tells_restarts: else a restart is seen by the total alone, unless it has grown past its old value meanwhile."""
    time, total, restarts = 0.0, 100.0, 0
    samples = [sample(0, replicas=[replica(0, tokens={"generated": total})])]
    gains: list[tuple[float, float]] = []
    for seconds, is_restart, added, _ in life:
        time += seconds
        if is_restart and (tells_restarts or added < total):
            total, restarts = added, restarts + 1
        else:
            total += added
        gains.append((seconds, added))
        one = replica(0, tokens={"generated": total}, restarts=restarts if tells_restarts else 0)
        samples.append(sample(0, time=START_S + time, replicas=[one]))
    history = history_of(samples)
    assert history.rates("generated", 100) == pytest.approx([added / seconds for seconds, added in gains])
    whole_s = sum(seconds for seconds, _ in gains)
    assert history.rate("generated", whole_s) == pytest.approx(sum(added for _, added in gains) / whole_s)
    assert history.rates("generated", 1) == pytest.approx([gains[-1][1] / gains[-1][0]])


def test_rates_add_the_replicas_and_leave_out_one_that_was_not_there() -> None:
    samples = [
        sample(0, replicas=[replica(0, 0, tokens={"generated": 10})]),
        sample(1, replicas=[replica(1, 0, tokens={"generated": 15}), replica(1, 1, tokens={"generated": 1000})]),
        sample(2, replicas=[replica(2, 0, tokens={"generated": 25}), replica(2, 1, tokens={"generated": 1003})]),
        sample(3, replicas=[replica(3, 0, tokens={}), replica(3, 1, tokens={"generated": 1007})]),
    ]
    history = history_of(samples)
    assert history.rates("generated", 9) == [5, 13, 4]
    assert history.rate("generated", seconds=2, index=1) == 3.5
    assert history.rates("prompt", 9) == [0, 0, 0]


def test_a_new_server_begins_its_totals_anew_even_if_they_are_larger() -> None:
    newer = {**sample(1)["server"], "started": START_S + 0.5}
    samples = [
        sample(0, replicas=[replica(0, tokens={"generated": 10})]),
        sample(1, replicas=[replica(1, tokens={"generated": 12})], server=newer),
    ]
    assert history_of(samples).rates("generated", 9) == [12]


def moment(second: float, **changes: Any) -> dict[str, Any]:
    """Of the server's own past."""
    blocks = {"total": 6_000, "used": int(second) % 97, "cached": 7, "free": 1}
    tokens = {"generated": int(10 * second), "prompt": 0}
    one = {"index": 0, "state": "up", "restarts": 0, "running": 3, "tokens": tokens, "blocks": blocks}
    return {"time": START_S + second, "requests": {"failed": 1}, "replicas": [one | changes]}


@given(
    st.lists(st.integers(0, 1200), unique=True).map(sorted),
    st.lists(st.integers(0, 1200), unique=True, max_size=180).map(sorted),
)
def test_what_the_server_remembers_fills_the_times_without_samples(own: list[int], past: list[int]) -> None:
    now = max([*own, *past, 0]) + 1
    history = history_of([sample(second) for second in own])
    history.add(read_sample(line(sample(now, past=[moment(second) for second in past]))))
    kept = {second for second in past if not any(abs(second - other) < 5 for other in own)}
    expected = [second for second in sorted({*own, *kept, now}) if now - second <= 900]
    assert [one["time"] - START_S for one in history.samples] == expected
    assert [one["time"] - START_S for one in history.samples if one["is_past"]] == [
        one for one in expected if one in kept
    ]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 5, 30]), st.integers(0, 50)), min_size=1, max_size=60),
    st.sampled_from([1, 10, 45, 900]),
)
def test_a_quarter_of_an_hour_has_the_mean_of_each_part(steps: list[tuple[int, int]], count: int) -> None:
    """By seconds, each of which has the rate of the samples around it; none in a pause of more than five."""
    second, total, rates = 0, 0, {}
    samples = [sample(0, replicas=[replica(0, tokens={"generated": 0})])]
    for seconds, added in steps:
        if seconds <= 5:
            rates |= dict.fromkeys(range(second, second + seconds), added / seconds)
        second, total = second + seconds, total + added
        samples.append(sample(second, replicas=[replica(0, tokens={"generated": total})]))
    size = 900 // count
    parts = [[rates.get(second - 900 + size * part + number) for number in range(size)] for part in range(count)]
    known = [[rate for rate in part if rate is not None] for part in parts]
    assert history_of(samples).means("generated", count) == [
        pytest.approx(sum(part) / len(part)) if part else None for part in known
    ]


def test_the_past_of_the_pool_has_gaps_where_nothing_is_known_or_the_manager_was_started_again() -> None:
    past = [moment(second) for second in range(0, 100, 5)] + [moment(second, restarts=1) for second in (100, 105, 120)]
    down = {"index": 0, "state": "down", "restarts": 0}
    past.insert(10, {"time": START_S + 48, "replicas": [down]})
    now = sample(121, past=past, replicas=[replica(121, restarts=1)])
    curves = history_of([now]).used_blocks(0)
    assert [curve.xs for curve in curves] == [
        tuple(float(second - 121) for second in seconds) for seconds in (range(0, 100, 5), (100, 105), (120, 121))
    ]
    assert curves[0].ys == tuple(float(second % 97) for second in range(0, 100, 5))


def test_a_first_sample_has_a_rate_by_the_servers_past_and_no_parts() -> None:
    now = sample(2, past=[moment(0)], replicas=[replica(2, tokens={"generated": 50})])
    history = history_of([now])
    assert history.rate("generated") == 25
    assert history.counted(0, 10) == (0, [])


def test_one_sample_has_no_rate() -> None:
    history = history_of([sample(0)])
    assert (history.rate("generated"), history.rates("generated", 9), history.counted(0, 9)) == (None, [], (0, []))


@given(points(), st.integers(1, 59), st.integers(0, 200), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_an_old_forecast_lies_on_todays_axis_where_it_foresaw_each_step(
    curve: tuple[list[int], list[int]], seconds: int, rounds: int, microbatches: int, ahead: int
) -> None:
    """Every step of it keeps its blocks: found by the number of the step, counted in microbatches."""
    seconds += 5
    steps, blocks = [x - curve[0][0] for x in curve[0]], curve[1]
    old = replica(0, step=40, microbatches=microbatches)
    old["forecast"] = {"step": 40 + ahead, "steps": steps, "blocks": blocks, "peak": max(blocks), "limit": 100}
    new = replica(0, step=40 + rounds * microbatches, microbatches=microbatches)
    new["forecast"] = {"step": new["step"] + ahead, "steps": [0, 1], "blocks": [1, 0], "peak": 1, "limit": 100}
    found = history_of([sample(0, replicas=[old]), sample(seconds, replicas=[new])]).earlier_forecast(0)
    assert found is not None
    assert found[0] == seconds
    for x, y in zip(steps, blocks, strict=True):
        absolute_step = 40 + ahead + x * microbatches
        today = (absolute_step - new["forecast"]["step"]) / microbatches
        assert today in found[1].xs
        assert y in [own for place, own in zip(found[1].xs, found[1].ys, strict=True) if place == today]


def test_the_earlier_forecast_is_a_minute_old_or_the_oldest_there_is() -> None:
    ages = [(4, None), (5, 5), (30, 30), (60, 60), (61, 60), (200, 60)]
    for last, age in ages:
        found = history_of([sample(second) for second in range(last + 1)]).earlier_forecast(0)
        assert (None if found is None else found[0]) == age


@pytest.mark.parametrize("change", [{"restarts": 1}, {"step": 3}, {"state": "down", "step": None, "forecast": None}])
def test_a_restart_hides_the_forecasts_before_it(change: dict[str, Any]) -> None:
    samples = [sample(second) for second in range(40)]
    new = [sample(40 + second, replicas=[replica(second, **change)]) for second in range(3)]
    history = history_of(samples + new)
    assert history.earlier_forecast(0) is None
    assert len(history.past_blocks(0).xs) <= 3


def test_the_past_of_the_pool_ends_now_and_ascends() -> None:
    history = history_of([sample(second) for second in range(10)])
    past = history.past_blocks(0)
    assert past.xs == tuple(-80.0 * seconds_ago for seconds_ago in range(9, -1, -1))
    assert past.ys == tuple(2400.0 + 20 * second + 600 for second in range(10))


@given(st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=64), min_size=1, max_size=30))
def test_lengths_compare_the_newest_sequences(by_second: list[list[tuple[int, int]]]) -> None:
    samples = [sample(second, replicas=[replica(second, lengths=pairs)]) for second, pairs in enumerate(by_second)]
    found = history_of(samples).lengths(0)
    quotients = [actual / predicted for pairs in by_second for predicted, actual in pairs if predicted > 0][-1024:]
    assert found == quotients[::-1]


def test_what_is_counted_is_in_the_samples_after_the_first() -> None:
    history = history_of([sample(second, replicas=[replica(second, steps=second)]) for second in range(100)])
    seconds, counted = history.counted(0, 60)
    assert (seconds, [one["steps"] for one in counted]) == (60, list(range(40, 100)))
    assert history.counted(7, 60) == (60, [])


def test_a_clock_that_was_set_back_begins_a_new_series_and_old_samples_are_forgotten() -> None:
    history = history_of([sample(second) for second in range(0, 2000, 10)])
    assert len(history.samples) == 91
    history.add(read_sample(line(sample(5))))
    assert len(history.samples) == 1


def test_a_sample_without_the_engines_answer_is_passed_over() -> None:
    """It has the totals that the server knows by itself, and neither step nor blocks."""
    samples = [sample(second) for second in range(80)]
    whole = history_of(samples)
    keys = ("index", "state", "restarts", "running", "background", "waiting", "queue_depth", "tokens")
    for second in (40, 79):
        late = samples[second]["replicas"][0]
        samples[second]["replicas"] = [{key: late[key] for key in keys}]
    history = history_of(samples)
    found, past = history.replica(0), history.past_blocks(0)
    assert found is not None
    assert (found["step"], found["blocks"].total) == (78 * 80, 6000)
    assert len(past.xs) == 78
    assert past.xs[0] == -78 * 80.0
    assert history.rates("generated", 100) == whole.rates("generated", 100)
    history.add(read_sample(line(sample(86, replicas=samples[79]["replicas"]))))
    late_one = history.replica(0)
    assert late_one is not None
    assert "step" not in late_one, "nobody knows any more"
