"""Writes line plots with two logarithmic axes (base 2) as an SVG file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 70, 50, 40, 130
_LINE_HEIGHT = 14
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#97bbf5", "#a463f2", "#9c6b4e")


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Lines on logarithmic axes."""

    title: str
    x_name: str
    y_name: str
    lines: Mapping[str, Mapping[float, float]]
    """Name -> {x: y}; x and y are positive."""


def write_line_plots(path: Path, plots: Sequence[LinePlot]) -> None:
    """The plots in one picture, one below the other. Raises OSError."""
    height = _HEIGHT * len(plots)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">'
    parts = [head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>']
    for number, plot in enumerate(plots):
        parts += [f'<g transform="translate(0 {number * _HEIGHT})">', *_parts(plot), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _parts(plot: LinePlot) -> list[str]:
    lines = plot.lines
    xs = [x for line in lines.values() for x in line]
    ys = [y for line in lines.values() for y in line.values()]
    low_x, high_x, low_y, high_y = math.log2(min(xs)), math.log2(max(xs)), math.log2(min(ys)), math.log2(max(ys))
    low_y, high_y = math.floor(low_y), max(math.ceil(high_y), math.floor(low_y) + 1)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - low_x) / max(high_x - low_x, 1e-9) * (_WIDTH - _LEFT - _RIGHT)
        up = (math.log2(y) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + right, 1), round(_HEIGHT - _BOTTOM - up, 1)

    parts = [_text(_WIDTH / 2, 20, plot.title, "middle"), _text(_WIDTH / 2, _HEIGHT - 8, plot.x_name, "middle")]
    parts.append(_text(_LEFT, _TOP - 8, plot.y_name, "middle"))
    for exponent in range(low_y, high_y + 1):
        _, y = to_pixels(xs[0], 2.0**exponent)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{2.0**exponent:g}", "end"))
    below = _HEIGHT - _BOTTOM + 18
    parts += [_text(to_pixels(x, ys[0])[0], below, f"{x:,g}", "middle") for x in sorted(set(xs))]
    name_y = -float(_HEIGHT)
    colours = dict(zip(lines, _COLOURS * len(lines), strict=False))
    for name in sorted(lines, key=lambda name: -lines[name][max(lines[name])]):  # as their ends are from above
        line, colour = lines[name], colours[name]
        points = [to_pixels(x, y) for x, y in sorted(line.items())]
        path_points = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        name_y = max(points[-1][1] + 4, name_y + _LINE_HEIGHT)
        parts.append(_text(points[-1][0] + 8, name_y, name, "start", colour))
    return parts


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}" fill="{colour}">{text}</text>'
