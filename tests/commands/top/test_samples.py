"""Samples from their JSON: strict about the version, tolerant of all else."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.top.helpers.scripted_samples import line, replica, sample
from tokasaurus.commands.top.history import History
from tokasaurus.commands.top.samples import NotASample, UnknownFormat, read_sample
from tokasaurus.commands.top.view import Frame, Look, compact_line, screen_lines

LOOK = Look()


def test_all_fields_are_read() -> None:
    read = read_sample(line(sample(3)))
    told = json.loads(line(sample(3)))
    for name, value in told["replicas"][0].items():
        read_value = read["replicas"][0][name]
        assert json.loads(orjson.dumps(read_value)) == value, name
    for part in ("server", "requests"):
        assert {name: read[part][name] for name in told[part]} == told[part]
    assert {name: read["jobs"][0][name] for name in told["jobs"][0]} == told["jobs"][0]


def test_what_is_absent_is_nothing_and_what_is_wrong_counts_as_absent() -> None:
    """But for the step and the totals, whose absence says that the engine has not answered."""
    (one,) = read_sample(line(sample(0, replicas=[{"running": "x", "lengths": [[1, 2], [3], 4], "forecast": {}}])))[
        "replicas"
    ]
    assert (one["running"], one["lengths"], one["forecast"], one["next"], one["state"]) == (0, [(1, 2)], None, None, "")
    assert (one["blocks"].total, one["stages"]) == (0, [])
    assert not one.keys() & {"step", "tokens"}


def test_a_moment_of_the_past_has_the_blocks_in_use_as_own_ones() -> None:
    moment = {"time": 5.0, "requests": {"failed": 1}, "replicas": [{"index": 0, "blocks": {"total": 9, "used": 4}}]}
    (past,) = read_sample(line(sample(3, past=[moment, 3])))["past"]
    assert (past["time"], past["requests"]["failed"], past["replicas"][0]["blocks"].own) == (5.0, 1, 4)


@pytest.mark.parametrize("version", [0, 2, "1", True, [1], 1.5])
def test_another_version_is_refused_by_name(version: Any) -> None:
    with pytest.raises(UnknownFormat, match="is not known, this toka reads 1"):
        read_sample(line({**sample(0), "format": version}))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"null", b"{}", b'{"format": 1}', b'{"format":1,"time":null}']
)
def test_what_is_no_sample_is_refused(content: bytes) -> None:
    with pytest.raises(NotASample):
        read_sample(content)


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A copy with one of its inner values replaced, or left out if `new` is missing."""
    if not isinstance(value, dict | list) or not value:
        return new
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    place = path[0] % len(items)
    inner = changed(items[place][1], path[1:], new) if len(path) > 1 else new
    kept = [(key, inner if number == place else own) for number, (key, own) in enumerate(items)]
    kept = [(key, own) for key, own in kept if own is not ...]
    return dict(kept) if isinstance(value, dict) else [own for _, own in kept]


WRONG = st.sampled_from(
    [..., None, True, "x\x1b[2J", -1, 0, 2.5, 10**30, [], {}, [[]], [None], {"a": {"b": 1}}, {"steps": [1]}]
)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), WRONG, st.integers(1, 130), st.integers(1, 45))
def test_a_wrong_or_absent_value_never_hinders_the_rest(path: list[int], new: Any, width: int, height: int) -> None:
    """Nor does it reach the terminal with a character that moves the cursor, or make a line too long."""
    history = History()
    for second in range(8):
        value = changed(sample(second, replicas=[replica(second), replica(second, 1)]), path, new)
        value = {**value, "format": 1, "time": sample(second)["time"], "unknown": [1]}
        history.add(read_sample(json.dumps(value).encode()))
    lines = screen_lines(history, Frame("live"), width, height, LOOK)
    assert len(lines) <= height
    for text in [*lines, compact_line(history)]:
        plain = text if isinstance(text, str) else text.plain
        assert plain.isprintable(), plain
    assert all(text.cell_len <= width for text in lines)
