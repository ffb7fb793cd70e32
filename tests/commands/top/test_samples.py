"""Samples from their JSON: strict about the version, tolerant of all else."""

import json
from typing import Any

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
    one = read.replicas[0]
    assert (read.server.model, read.server.dtype, read.requests["answered"]) == (
        "SmolLM2-135M-Instruct",
        "bfloat16",
        103,
    )
    assert (one.step, one.running, one.blocks.cached, one.tokens["generated"]) == (240, 210, 1200, 50_400)
    assert one.forecast is not None
    assert (one.forecast.steps[-1], one.forecast.peak, one.forecast.limit) == (9000, 4800, 6000)
    assert one.next is not None
    assert (one.next.fits_in_steps, one.next.blocked_by, one.oldest_wait_seconds) == (61, "blocks", 3.2)
    assert one.lengths == ((120, 131), (200, 150))
    assert (len(one.oldest), one.oldest[1].client, one.oldest[1].generated_tokens) == (11, "alice", 100)
    assert (read.jobs[0].lines_total, read.jobs[0].device_seconds, read.jobs[0].price) == (1000, 12.5, None)


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
