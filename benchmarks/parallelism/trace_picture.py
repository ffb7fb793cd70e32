"""Draws some steps of a trace of pipeline stages as an SVG file.

`python -m benchmarks.parallelism.trace_picture TRACE PICTURE --first-step 30 --steps 9`
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 90, 20, 40, 60
_LANE, _GAP = 34, 46
"""Heights: of a lane, and between lanes."""
_COLOURS = ("#a5c8f0", "#f6d592", "#b9e0b0", "#f3b4a8", "#d0bdec", "#b6e3df", "#f0bcd8", "#d9cdb4", "#cccccc")
_NARROWEST_LABEL = 44
_TICKS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Window:
    """The part of the trace that is drawn. Times are microseconds."""

    start: float
    end: float

    def x(self, time: float) -> float:
        share = (min(max(time, self.start), self.end) - self.start) / (self.end - self.start)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def has(self, event: Event) -> bool:
        return bool(event["ts"] < self.end and event["ts"] + event.get("dur", 0.0) > self.start)


def write_trace_picture(path: Path, events: Sequence[Event], first_step: int, num_steps: int) -> None:
    """events: of one replica. It begins with the first of these steps in the first stage, and ends with the last
    one in the last stage.

    Raises ValueError if the trace lacks one of these steps.
    """
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    stages = [pid for name, pid in sorted(names.items()) if name.startswith("model worker")]
    lanes = {pid: number for number, pid in enumerate([names["manager"], *stages])}
    forwards = [event for event in events if event["name"].startswith("microbatch ") and event["tid"] == 0]
    wanted = range(first_step, first_step + num_steps)
    drawn = {(event["pid"], event["args"]["step"]): event for event in forwards if event["args"]["step"] in wanted}
    if len(drawn) != len(stages) * num_steps:
        raise ValueError(f"the trace lacks some of the steps {first_step} to {wanted[-1]}")
    last = drawn[stages[-1], wanted[-1]]
    window = _Window(drawn[stages[0], first_step]["ts"], last["ts"] + last["dur"])
    parts = _axis(window, len(lanes))
    for name, pid in names.items():
        parts.append(_text(_LEFT - 8, _top(lanes[pid]) + 21, name.removeprefix("model worker, "), "end"))
    parts += [_forward(window, lanes, event) for event in forwards if window.has(event)]
    parts += [_wait(window, lanes, event) for event in events if event["name"].startswith("wait") and window.has(event)]
    parts += [
        _step_of_manager(window, event) for event in events if event["name"] == "engine step" and window.has(event)
    ]
    parts += _transfers(window, lanes, events)
    num_microbatches = 1 + max(int(event["name"].split()[1]) for event in forwards)
    parts += _legend(num_microbatches, len(lanes))
    height = _bottom(len(lanes)) + _BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">'
    background = f'<rect width="{_WIDTH}" height="{height}" fill="white"/>'
    path.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n", encoding="utf-8")


def _top(lane: int) -> int:
    return _TOP + lane * (_LANE + _GAP)


def _bottom(num_lanes: int) -> int:
    return _top(num_lanes - 1) + _LANE


def _axis(window: _Window, num_lanes: int) -> list[str]:
    """A line for each of about ten times."""
    length_ms = (window.end - window.start) / 1e3
    tick_ms = next((tick for tick in _TICKS_MS if length_ms / tick <= 12), _TICKS_MS[-1])
    parts = []
    for number in range(int(length_ms / tick_ms) + 1):
        x = window.x(window.start + number * tick_ms * 1e3)
        parts.append(f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{_bottom(num_lanes) + 6}" stroke="#e4e4e4"/>')
        parts.append(_text(x, _TOP - 14, f"{number * tick_ms:g}" + (" ms" if number == 0 else ""), "middle"))
    return parts


def _forward(window: _Window, lanes: dict[int, int], event: Event) -> str:
    colour = _COLOURS[int(event["name"].split()[1]) % len(_COLOURS)]
    left, right = window.x(event["ts"]), window.x(event["ts"] + event["dur"])
    top = _top(lanes[event["pid"]])
    label = f"step {event['args']['step']}"
    text = _text((left + right) / 2, top + 21, label, "middle") if right - left >= _NARROWEST_LABEL else ""
    return _box(left, right, top, _LANE, colour, "#777") + text


def _wait(window: _Window, lanes: dict[int, int], event: Event) -> str:
    return _box(
        window.x(event["ts"]), window.x(event["ts"] + event["dur"]), _top(lanes[event["pid"]]), _LANE, "white", "#777"
    )


def _step_of_manager(window: _Window, event: Event) -> str:
    left, right = window.x(event["ts"]), window.x(event["ts"] + event["dur"])
    return _box(left, max(right, left + 0.5), _top(0), _LANE, "#555", "none")


def _transfers(window: _Window, lanes: dict[int, int], events: Sequence[Event]) -> list[str]:
    """An arrow from where and when something was sent to where and when it was taken."""
    begins = {event["id"]: event for event in events if event["ph"] == "b"}
    parts = []
    for end in (event for event in events if event["ph"] == "e"):
        begin = begins[end["id"]]
        if begin["ts"] < window.start or end["ts"] > window.end:
            continue
        sender, receiver = lanes[begin["pid"]], lanes[end["pid"]]
        goes_down = receiver > sender
        y1, y2 = (_bottom(sender + 1), _top(receiver)) if goes_down else (_top(sender), _bottom(receiver + 1))
        line = f'x1="{window.x(begin["ts"])}" y1="{y1}" x2="{window.x(end["ts"])}" y2="{y2}"'
        style = 'stroke="#444"' if goes_down else 'stroke="#c0392b" stroke-dasharray="5 3"'
        parts.append(f'<line {line} {style} stroke-width="1.3"/>')
        parts.append(f'<circle cx="{window.x(end["ts"])}" cy="{y2}" r="2.5" fill="#444"/>')
    return parts


def _legend(num_microbatches: int, num_lanes: int) -> list[str]:
    y = _bottom(num_lanes) + 28
    parts, x = [_text(_LEFT, y + 12, "microbatch", "start")], _LEFT + 80.0
    for name, colour in [
        *((str(number), _COLOURS[number % len(_COLOURS)]) for number in range(num_microbatches)),
        ("waits", "white"),
        ("manager at work", "#555"),
    ]:
        parts += [_box(x, x + 16, y, 14, colour, "#777"), _text(x + 22, y + 12, name, "start")]
        x += 40 + 7.5 * len(name)
    for name, style in [
        ("hidden states", 'stroke="#444"'),
        ("sampled tokens", 'stroke="#c0392b" stroke-dasharray="5 3"'),
    ]:
        parts.append(f'<line x1="{x}" y1="{y + 7}" x2="{x + 24}" y2="{y + 7}" {style} stroke-width="1.3"/>')
        parts.append(_text(x + 30, y + 12, name, "start"))
        x += 50 + 7.5 * len(name)
    return parts


def _box(left: float, right: float, top: float, height: float, colour: str, edge: str) -> str:
    place = f'x="{left}" y="{top}" width="{round(right - left, 1)}" height="{height}"'
    return f'<rect {place} fill="{colour}" stroke="{edge}" stroke-width="0.6"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{round(x, 1)}" y="{y}" font-size="12" text-anchor="{anchor}" fill="#333">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallelism.trace_picture", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("trace", type=Path, help="file that a server with `trace=` has written")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--first-step", type=int, required=True)
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    events = json.loads(arguments.trace.read_text(encoding="utf-8"))
    write_trace_picture(arguments.picture, events, arguments.first_step, arguments.steps)


if __name__ == "__main__":
    main()
