"""Traces: which steps they hold, the file that several processes write, and what happens if it cannot be written."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError
from tokasaurus.monitoring.trace import NO_TRACE, Trace, trace_file
from tokasaurus.workers import num_replicas


def make_trace(path: Path | None, first_step: int = 0, num_steps: int = 100, process: str = "manager") -> Trace:
    return Trace(path, first_step, num_steps, replica=0, process=process, row=0)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All that have a time."""
    return [event for event in json.loads(path.read_text()) if "ts" in event]


def test_the_file_holds_the_steps_that_were_asked_for_and_is_written_after_the_last(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = make_trace(path, first_step=2, num_steps=3)
    with trace_file(str(path)):
        for step in range(8):
            trace.cover(step, step)
            trace.add("forward", step, step + 0.5, rows=step * 10)
            assert path.read_text() == "[\n" if step <= 4 else path.read_text().count("forward") == 3
    events = read_events(path)
    assert [(event["ts"], event["dur"], event["args"]) for event in events] == [
        (step * 1e6, 0.5e6, {"step": step, "rows": step * 10}) for step in (2, 3, 4)
    ]


def test_steps_that_overlap_the_range_are_in_it(tmp_path: Path) -> None:
    """Several steps are at work at once: from the oldest without a result to the newest."""
    path = tmp_path / "trace.json"
    trace = make_trace(path, first_step=4, num_steps=2)
    with trace_file(str(path)):
        for oldest, newest in [(1, 3), (2, 4), (5, 7), (6, 8)]:
            trace.cover(oldest, newest)
            trace.add("forward", 0.0, 1.0)
    assert [event["args"]["step"] for event in read_events(path)] == [4, 7]


def test_nothing_is_noted_in_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = make_trace(path)
    with trace_file(str(path)):
        for name, pauses in [("a", False), ("b", True), ("c", False)]:
            trace.cover(0, 0)
            if pauses:
                trace.pause()
            with trace.span(name):
                pass
        trace.write()
    assert [event["name"] for event in read_events(path)] == ["a", "c"]


def test_a_trace_without_a_file_notes_nothing_and_hands_out_one_span() -> None:
    for trace in (NO_TRACE, make_trace(None)):
        trace.cover(0, 0)
        assert not trace.is_on
        assert trace.span("a") is trace.span("b"), "no object is made"
        trace.write()


def test_processes_write_together_and_events_are_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier server")
    with trace_file(str(path)):
        for number in (2, 1, 3):
            trace = make_trace(path, process=f"stage {number}")
            trace.cover(0, 0)
            trace.add(f"forward {number}", number, number + 1)
            trace.add("kernels", number, number + 1, lane="device")
            trace.write()
            trace.write()
            trace.add("too late", 0, 1)
    events = json.loads(path.read_text())
    assert [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0] == [
        f"forward {number}" for number in (1, 2, 3)
    ]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"stage {number}" for number in (1, 2, 3)
    }
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {lanes[event["tid"]] for event in events if event["name"] == "kernels"} == {"device"}
    assert "too late" not in {event["name"] for event in events}


def test_a_transfer_is_one_arrow_and_is_left_out_if_an_end_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_file(str(path)):
        sender, receiver = make_trace(path, first_step=5), make_trace(path)
        for step in range(4, 8):
            sender.cover(step, step)
            sender.begin_transfer("hidden states", 0)
        for step in range(4, 7):
            receiver.cover(step, step)
            receiver.end_transfer("hidden states", 0, step)
        for trace in (sender, receiver):
            trace.write()
    ends: dict[str, list[str]] = {}
    for event in read_events(path):
        assert event["cat"] == "transfer"
        ends.setdefault(event["id"], []).append(event["ph"])
    assert ends == {f"hidden states: replica 0, rank 0, step {step}": ["b", "e"] for step in (5, 6)}


def test_short_parts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_file(str(path)):
        trace = make_trace(path)
        trace.cover(0, 0)
        trace.add_part("short", 1.0, 1.000004)
        trace.add_part("long", 1.0, 1.000006)
        trace.write()
    assert [event["name"] for event in read_events(path)] == ["long"]


def test_rounding_keeps_spans_inside_and_apart(tmp_path: Path) -> None:
    """Viewers drop a span that ends after the one around it."""
    path = tmp_path / "trace.json"
    generator = random.Random(0)
    times = [sorted(generator.uniform(1e4, 1e4 + 1e-4) for _ in range(3)) for _ in range(200)]
    with trace_file(str(path)):
        trace = make_trace(path)
        trace.cover(0, 0)
        for number, (start, middle, end) in enumerate(times):
            for name, *ends in [("outer", start, end), ("first", start, middle), ("second", middle, end)]:
                trace.add(f"{name} {number}", *ends)
        trace.write()
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in read_events(path)}
    for number, (start, _, end) in enumerate(times):
        outer, first, second = (spans[f"{name} {number}"] for name in ("outer", "first", "second"))
        assert outer == (first[0], second[1]) == pytest.approx((start * 1e6, end * 1e6), abs=0.51, rel=0)
        assert first[1] == second[0]


@pytest.mark.parametrize(
    ("flags", "name", "row"),
    [
        (("pp_size=2",), "stage 1", 2),
        (("dp_size=2", "pp_size=2"), "replica 1: stage 1", 5),
    ],
)
def test_processes_have_names_and_places(flags: tuple[str, ...], name: str, row: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = ServerConfig.parse([f"trace={path}", *flags])
    with trace_file(config.trace):
        Trace.of(config, "stage 1", num_replicas(config) - 1, row=2).write()
    described = {event["name"]: event["args"] for event in json.loads(path.read_text()) if "ts" not in event}
    assert described["process_name"] == {"name": name}
    assert described["process_sort_index"] == {"sort_index": row}


def test_a_file_that_cannot_be_begun_is_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(UserError, match=rf"^trace={path}: No such file or directory$"), trace_file(str(path)):
        pytest.fail("entered")


def test_a_process_that_cannot_write_goes_on_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = make_trace(tmp_path)  # a directory
    trace.cover(0, 0)
    with caplog.at_level(logging.WARNING, logger="tokasaurus.monitoring.trace"):
        trace.write()
    assert caplog.messages == [f"trace={tmp_path}: Is a directory"]


def test_a_file_that_somebody_else_changed_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.WARNING, logger="tokasaurus.monitoring.trace"), trace_file(str(path)):
        path.write_text('[\n{"ph": "X", "na')
    assert path.read_text() == '[\n{"ph": "X", "na'
    (message,) = caplog.messages
    assert message.startswith(f"trace={path}: ")
