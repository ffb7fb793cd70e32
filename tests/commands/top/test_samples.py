"""Samples from their JSON, what follows from a series of them against slow computations, and recordings."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.top.helpers.scripted_samples import START_S, line, replica, sample
from tokasaurus.commands.top.samples import History, NotASample, Recording, read_sample
from tokasaurus.messages.status import UserError


def history_of(samples: list[dict[str, Any]]) -> History:
    history = History()
    for value in samples:
        history.add(read_sample(line(value)))
    return history


def test_all_fields_are_read() -> None:
    read, told = read_sample(line(sample(3))), sample(3)
    for part in ("server", "requests"):
        assert {name: read[part][name] for name in told[part]} == told[part]
    for part in ("replicas", "jobs"):
        own = json.loads(orjson.dumps(read[part][0]))
        assert {name: own[name] for name in told[part][0]} == told[part][0]


def test_what_is_absent_is_nothing_and_what_is_wrong_counts_as_absent() -> None:
    (one,) = read_sample(line(sample(0, replicas=[{"running": "x", "lengths": [[1, 2], [3]]}])))["replicas"]
    assert (one["running"], one["lengths"], one["forecast"], one["state"]) == (0, [(1, 2), (0, 0)], None, "")
    assert (one["blocks"].total, one["stages"], one["tokens"]["prompt"]) == (0, [], 0)


@pytest.mark.parametrize("version", [0, 2, "1", [1], 1.5])
def test_another_version_is_refused_by_name(version: Any) -> None:
    with pytest.raises(NotASample, match="is not known, this toka reads 1"):
        read_sample(line({**sample(0), "format": version}))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"{}", b'{"format": 1}'])
def test_what_is_no_sample_is_refused(content: bytes) -> None:
    with pytest.raises(NotASample):
        read_sample(content)


@st.composite
def lives_of_a_total(draw: st.DrawFn) -> list[tuple[float, bool, float]]:
    """(seconds since the sample before, whether the total began at 0 again, what was added since)."""
    steps = st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.booleans(), st.integers(0, 50).map(float))
    return draw(st.lists(steps, min_size=1, max_size=12))


@given(lives_of_a_total(), st.booleans())
def test_rates_count_every_token_once_over_restarts(
    life: list[tuple[float, bool, float]], tells_restarts: bool
) -> None:
    """tells_restarts: else a restart is seen by the total alone, unless it has grown past its old value meanwhile."""
    time, total, restarts = 0.0, 100.0, 0
    samples = [sample(0, replicas=[replica(0, tokens={"generated": total})])]
    for seconds, is_restart, added in life:
        time += seconds
        if is_restart and (tells_restarts or added < total):
            total, restarts = added, restarts + 1
        else:
            total += added
        one = replica(0, tokens={"generated": total}, restarts=restarts if tells_restarts else 0)
        samples.append(sample(0, time=START_S + time, replicas=[one]))
    (rate,) = history_of(samples).means("generated", time)
    assert rate == pytest.approx(sum(added for _, _, added in life) / time)


def test_rates_add_the_replicas_and_leave_out_one_that_was_not_there() -> None:
    samples = [
        sample(0, replicas=[replica(0, 0, tokens={"generated": 10})]),
        sample(1, replicas=[replica(1, 0, tokens={"generated": 15}), replica(1, 1, tokens={"generated": 1000})]),
        sample(2, replicas=[replica(2, 0, tokens={"generated": 25}), replica(2, 1, tokens={"generated": 1003})]),
    ]
    history = history_of(samples)
    assert history.means("generated", 2, 2) == [5, 13]
    assert history.means("generated", 1, index=1) == [3]
    assert history.means("prompt", 3, 3) == [None, 0, 0]
    assert history_of(samples[:1]).means("generated", 5) == [None]


def test_a_new_server_begins_its_totals_anew_even_if_they_are_larger() -> None:
    newer = {**sample(1)["server"], "started": START_S + 0.5}
    samples = [
        sample(0, replicas=[replica(0, tokens={"generated": 10})]),
        sample(1, replicas=[replica(1, tokens={"generated": 12})], server=newer),
    ]
    assert history_of(samples).means("generated", 1) == [12]


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
    assert history_of(samples).means("generated", 900, count) == [
        pytest.approx(sum(part) / len(part)) if part else None for part in known
    ]


def test_the_past_of_the_pool_has_gaps_where_nothing_is_known_or_the_manager_was_started_again() -> None:
    past = [moment(second) for second in range(0, 100, 5)] + [moment(second, restarts=1) for second in (100, 105, 120)]
    past.insert(10, {"time": START_S + 48, "replicas": [{"index": 0, "state": "down", "restarts": 0}]})
    lines = history_of([sample(121, past=past, replicas=[replica(121, restarts=1)])]).used_blocks(0)
    seconds = [(second, second + 5) for second in (*range(0, 95, 5), 100)] + [(120, 121)]
    assert [(start[0] + 121, end[0] + 121) for start, end in lines] == seconds
    assert [start[1] for start, _ in lines[:19]] == [second % 97 for second in range(0, 95, 5)]


def test_the_earlier_forecast_is_a_minute_old_or_the_oldest_there_is() -> None:
    for last, age_s in [(4, None), (5, 5), (30, 30), (60, 60), (61, 60), (200, 60)]:
        found_s, lines = history_of([sample(second) for second in range(last + 1)]).earlier_forecast(0)
        assert (found_s if lines else None) == age_s
        assert [start[0] for start, _ in lines] == [0.0125 * step - found_s for step in (0, 800, 801, 4000) if lines]


def test_a_restart_hides_the_forecasts_before_it() -> None:
    samples = [sample(second) for second in range(40)]
    samples += [sample(40 + second, replicas=[replica(second, restarts=1)]) for second in range(3)]
    history = history_of(samples)
    assert history.earlier_forecast(0) == (0, [])
    assert [end[0] for _, end in history.used_blocks(0)][-3:] == [-3, -1, 0]


@given(st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=64), min_size=1, max_size=30))
def test_lengths_compare_the_newest_sequences(by_second: list[list[tuple[int, int]]]) -> None:
    samples = [sample(second, replicas=[replica(second, lengths=pairs)]) for second, pairs in enumerate(by_second)]
    quotients = [actual / predicted for pairs in by_second for predicted, actual in pairs if predicted > 0]
    assert history_of(samples).lengths(0) == quotients[-1024:]


def test_what_is_counted_is_in_the_samples_after_the_first() -> None:
    history = history_of([sample(second, replicas=[replica(second, steps=second)]) for second in range(100)])
    seconds, counted = history.counted(0, 60)
    assert (seconds, [one["steps"] for one in counted]) == (60, list(range(40, 100)))
    assert history_of([sample(2, past=[moment(0)])]).counted(0, 60) == (0, [])


def test_a_clock_that_was_set_back_begins_a_new_series_and_old_samples_are_forgotten() -> None:
    history = history_of([sample(second) for second in range(0, 2000, 10)])
    assert len(history.samples) == 91
    history.add(read_sample(line(sample(5))))
    assert len(history.samples) == 1


def test_a_sample_without_the_engines_answer_is_passed_over_for_a_few_seconds() -> None:
    """It has the totals that the server knows by itself, and neither step nor blocks."""
    samples = [sample(second) for second in range(80)]
    whole = history_of(samples).means("generated", 80, 80)
    keys = ("index", "state", "restarts", "running", "background", "waiting", "queue_depth", "tokens")
    for second in (40, 79):
        late = samples[second]["replicas"][0]
        samples[second]["replicas"] = [{key: late[key] for key in keys}]
    history = history_of(samples)
    found = history.replica(0)
    assert found is not None
    assert (found["step"], found["blocks"].total) == (78 * 80, 6000)
    assert len(history.used_blocks(0)) == 77
    assert history.means("generated", 80, 80) == whole
    history.add(read_sample(line(sample(86, replicas=samples[79]["replicas"]))))
    late_one = history.replica(0)
    assert late_one is not None
    assert late_one["blocks"].total == 0, "nobody knows any more"


def recorded(path: Path, content: bytes) -> Recording:
    path.write_bytes(content)
    return Recording(str(path))


@pytest.mark.parametrize("num_cut", [0, 1, 2, 100, 1000])
def test_what_is_recorded_is_read_again_but_for_a_cut_last_line(tmp_path: Path, num_cut: int) -> None:
    lines = [line(sample(second)).rstrip() for second in range(5)]
    content = b"\n".join([*lines, b""])
    recording = recorded(tmp_path / "run.jsonl", content[: len(content) - num_cut])
    kept = lines if num_cut <= 1 else lines[:-1]
    assert [recording.line(index) for index in range(len(recording.positions))] == kept
    assert recording.num_left_out == 0


def test_damaged_lines_between_others_are_counted(tmp_path: Path) -> None:
    whole = [line(sample(second)) for second in range(3)]
    recording = recorded(tmp_path / "damaged.jsonl", whole[0] + whole[1][:50] + b"\n" + b"\n" + whole[2])
    assert (recording.positions, recording.num_left_out) == ([0, 2], 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no recording: the file is empty"),
        (b"\x00\xff" * 100, "no recording: no JSON"),
        (line({**sample(1), "format": 2}), "no recording: format 2 of samples is not known, this toka reads 1"),
    ],
)
def test_files_that_cannot_be_replayed_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"replay=.*/wrong.jsonl: {message}"):
        recorded(tmp_path / "wrong.jsonl", content)
    with pytest.raises(UserError, match=r"replay=.*/none: No such file or directory"):
        Recording(str(tmp_path / "none"))


def test_long_gaps_are_shortened_and_a_clock_set_back_passes_no_time(tmp_path: Path) -> None:
    content = b"".join(line(sample(second)) for second in (10, 11, 13, 1000, 990, 991))
    assert recorded(tmp_path / "run.jsonl", content).positions == [0, 1, 3, 8, 8, 9]


@given(st.lists(st.floats(-1, 400), max_size=20))
def test_a_replay_shows_the_samples_up_to_its_position(tmp_path_factory, positions: list[float]) -> None:
    content = b"".join(line(sample(second)) for second in range(401))
    recording = recorded(tmp_path_factory.mktemp("replay") / "run.jsonl", content)
    for position in positions:
        seconds = [one["time"] - START_S for one in recording.history_at(position).samples]
        last = max(0, int(position))
        assert seconds == list(range(int(seconds[0]), last + 1))
        assert len(seconds) >= min(last + 1, 300)
