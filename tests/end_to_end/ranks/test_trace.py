"""`trace=`: the file of a real server, read as a viewer would."""

import itertools
import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.helpers.one_process import LARGE, ask_stories
from tests.end_to_end.helpers.toka_process import free_port, running_toka, starting_toka, wait_for
from tests.helpers.tiny_model import save_tiny_model

Event = dict[str, Any]
FIRST, NUM_STEPS = 30, 60


def read_trace(path: Path) -> dict[str, list[Event]]:
    """Name of a process -> its events that have a time, in order of time."""
    events: list[Event] = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(set(names.values())) == len(names)
    processes: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            processes[names[event["pid"]]].append(event)
    return processes


def forwards(events: list[Event]) -> dict[int, Event]:
    """Step -> the span of its forward."""
    spans = [event for event in events if event["name"].startswith("microbatch ")]
    steps = {event["args"]["step"]: event for event in spans}
    assert len(steps) == len(spans)
    return steps


def assert_nested(events: list[Event]) -> None:
    """Spans of a lane are apart from or inside each other."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["tid"]].append(event)
    assert lanes
    for spans in lanes.values():
        ends: list[float] = []
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            ends.append(event["ts"] + event["dur"])
            assert len(ends) == 1 or ends[-1] <= ends[-2]


def is_inside(event: Event, span: Event) -> bool:
    end = event["ts"] + event.get("dur", 0.0)
    return bool(span["ts"] <= event["ts"] and end <= span["ts"] + span["dur"])


@pytest.mark.long
def test_a_trace_of_two_stages_shows_each_step_and_each_transfer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    path = tmp_path / "trace.json"
    flags = (f"trace={path}", f"trace_first_step={FIRST}", f"trace_steps={NUM_STEPS}")
    with running_toka(f"model={tmp_path / 'model'}", *LARGE, "pp_size=2", *flags) as toka:
        assert path.read_text() == "[\n"
        ask_stories(toka)
        assert toka.stop() == 0
    processes = read_trace(path)
    assert processes.keys() == {"manager", "model worker, stage 0", "model worker, stage 1"}
    for events in processes.values():
        assert_nested(events)
    manager, *stages = (processes[name] for name in sorted(processes))
    assert {"engine step", "steps", "sending", "results"} <= {event["name"] for event in manager}
    first, last = (forwards(events) for events in stages)
    assert first.keys() == last.keys() == set(range(FIRST, FIRST + NUM_STEPS))
    assert {event["name"] for event in first.values()} == {f"microbatch {number}" for number in range(3)}
    for step, span in first.items():
        assert span["name"] == last[step]["name"]
        assert span["args"] == last[step]["args"], "the same rows"
        assert span["ts"] < last[step]["ts"] + last[step]["dur"]
    for (_, span), (_, following) in itertools.pairwise(sorted(first.items())):
        assert span["ts"] + span["dur"] <= following["ts"]
    for name, events, steps in [("sampled tokens", stages[0], first), ("hidden states", stages[1], last)]:
        waits = [event for event in events if event["name"] == f"wait for {name}"]
        assert waits
        assert all(is_inside(event, steps[event["args"]["step"]]) for event in waits)

    transfers = defaultdict(list)
    for number, events in enumerate(stages):
        for event in events:
            if event["ph"] in "be":
                transfers[event["id"]].append((number, event))
    kinds = defaultdict(list)
    for (sender, begin), (receiver, end) in (sorted(ends, key=lambda at: at[1]["ph"]) for ends in transfers.values()):
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["name"] == end["name"]
        assert begin["ts"] <= end["ts"]
        kinds[begin["name"]].append((sender, receiver, begin["args"]["step"], end["args"]["step"]))
        at = (first, last)[sender][begin["args"]["step"]], (first, last)[receiver][end["args"]["step"]]
        assert is_inside(begin, at[0])
        assert is_inside(end, at[1])
    assert sorted(kinds["hidden states"]) == [(0, 1, step, step) for step in sorted(first)]
    assert len(kinds["sampled tokens"]) > NUM_STEPS // 2
    for sender, receiver, sampled, used in kinds["sampled tokens"]:
        assert (sender, receiver) == (1, 0)
        assert sampled < used


@pytest.mark.long
def test_a_server_that_is_stopped_before_the_last_step_writes_its_trace(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    path = tmp_path / "trace.json"
    with running_toka(f"model={tmp_path / 'model'}", *LARGE, f"trace={path}", "trace_steps=1000000") as toka:
        ask_stories(toka)
        assert toka.stop() == 0
    processes = read_trace(path)
    assert processes.keys() == {"manager", "model worker"}
    steps = forwards(processes["model worker"])
    assert steps.keys() == set(range(len(steps)))
    assert sum(event["args"]["decode_rows"] for event in steps.values()) > 8 * 2 * 100
    for events in processes.values():
        assert_nested(events)


@pytest.mark.long
def test_a_replica_that_is_started_again_is_not_traced_again(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    path = tmp_path / "trace.json"
    with running_toka(f"model={tmp_path / 'model'}", *LARGE, f"trace={path}", "trace_steps=20") as toka:
        texts = ask_stories(toka)
        os.kill(toka.children()["toka-worker-0"], signal.SIGKILL)
        wait_for(lambda: toka.gauge("toka_engine_restarts_total") == 1, 20)
        assert ask_stories(toka) == texts
        assert toka.stop() == 0
    processes = read_trace(path)
    assert processes.keys() == {"manager", "model worker"}
    assert forwards(processes["model worker"]).keys() == set(range(20))


def test_a_trace_that_cannot_be_written_ends_the_start_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with starting_toka(free_port(), f"model={tmp_path}", f"trace={path}") as toka:
        assert toka.process.wait(60) == 1
    assert [line for line in toka.lines if line.startswith("toka: ")] == [
        f"toka: trace={path}: No such file or directory"
    ]
