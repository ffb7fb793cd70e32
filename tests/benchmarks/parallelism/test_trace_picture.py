"""Pictures of traces: what is drawn where, for a trace written by hand and for the one in the documentation."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.parallelism.trace_picture import write_trace_picture

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
MANAGER, FIRST, LAST = 30, 10, 20
"""Process ids."""


def described(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def span(pid: int, name: str, start_ms: float, end_ms: float, step: int) -> dict[str, Any]:
    times = {"ts": 5e6 + start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, **times, "args": {"step": step}}


def transfer(phase: str, pid: int, name: str, at_ms: float, step: int) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "ts": 5e6 + at_ms * 1e3, "id": f"{name} {step}", "args": {}}


# Two steps of 10 ms in each stage: the second stage waits 4 ms for the second one.
EVENTS = [
    described(LAST, "model worker, stage 1"),
    described(FIRST, "model worker, stage 0"),
    described(MANAGER, "manager"),
    span(MANAGER, "engine step", 1, 2, 9),
    span(FIRST, "microbatch 0", 0, 10, 7),
    span(FIRST, "microbatch 1", 14, 24, 8),
    span(LAST, "microbatch 0", 10, 20, 7),
    span(LAST, "microbatch 1", 20, 34, 8),
    span(LAST, "wait for hidden states", 20, 24, 8),
    transfer("b", FIRST, "hidden states", 9, 7),
    transfer("e", LAST, "hidden states", 10, 7),
    transfer("b", LAST, "sampled tokens", 19, 7),
    transfer("e", FIRST, "sampled tokens", 21, 7),
]


def test_spans_are_drawn_in_proportion_and_stages_below_the_manager(tmp_path: Path) -> None:
    write_trace_picture(tmp_path / "picture.svg", EVENTS, 7, 2)
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    rows = [float(texts[name].attrib["y"]) for name in ("manager", "stage 0", "stage 1")]
    assert rows == sorted(set(rows))
    legend_y = float(texts["microbatch"].attrib["y"]) - 20
    boxes: dict[float, list[tuple[float, float]]] = {}
    for box in list(root.iter(f"{SVG}rect"))[1:]:  # the first one is the background
        x, y, width = (float(box.attrib[name]) for name in ("x", "y", "width"))
        if y < legend_y:
            boxes.setdefault(y, []).append((x, x + width))
    manager, first, last = (boxes[y] for y in sorted(boxes))
    left, right = first[0][0], last[1][1]

    def ms(edges: list[tuple[float, float]]) -> list[float]:
        return [pytest.approx((x - left) / (right - left) * 34, abs=0.05) for pair in edges for x in pair]

    assert ms(manager) == [1, 2]
    assert ms(first) == [0, 10, 14, 24]
    assert ms(last) == [10, 20, 20, 34, 20, 24]
    lines = [line for line in root.iter(f"{SVG}line") if "stroke-width" in line.attrib]
    arrows = [line for line in lines if float(line.attrib["y2"]) < legend_y]
    assert [ms([(float(line.attrib["x1"]), float(line.attrib["x2"]))]) for line in arrows] == [[9, 10], [19, 21]]
    goes_down = [float(line.attrib["y1"]) < float(line.attrib["y2"]) for line in arrows]
    assert goes_down == [True, False]


def test_a_trace_without_some_of_the_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the trace lacks some of the steps 7 to 9"):
        write_trace_picture(tmp_path / "picture.svg", EVENTS, 7, 3)


def test_the_picture_in_the_documentation_is_that_of_the_trace_beside_it(tmp_path: Path) -> None:
    events = json.loads((ROOT / "benchmarks" / "data" / "pipeline_trace.json").read_text())
    write_trace_picture(tmp_path / "picture.svg", events, first_step=156, num_steps=9)
    assert (tmp_path / "picture.svg").read_text() == (ROOT / "docs" / "pipeline_trace.svg").read_text()
