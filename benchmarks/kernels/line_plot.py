"""Writes a line plot with two logarithmic axes (base 2) as an SVG file."""

import math
from collections.abc import Mapping
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 70, 50, 40, 130
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#97bbf5")


def write_line_plot(
    path: Path, title: str, x_name: str, y_name: str, lines: Mapping[str, Mapping[float, float]]
) -> None:
    """lines: name -> {x: y}; x and y are positive."""
    xs = [x for line in lines.values() for x in line]
    ys = [y for line in lines.values() for y in line.values()]
    low_x, high_x, low_y, high_y = math.log2(min(xs)), math.log2(max(xs)), math.log2(min(ys)), math.log2(max(ys))
    low_y, high_y = math.floor(low_y), max(math.ceil(high_y), math.floor(low_y) + 1)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - low_x) / max(high_x - low_x, 1e-9) * (_WIDTH - _LEFT - _RIGHT)
        up = (math.log2(y) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + right, 1), round(_HEIGHT - _BOTTOM - up, 1)

    parts = [_text(_WIDTH / 2, 20, title, "middle"), _text(_WIDTH / 2, _HEIGHT - 8, x_name, "middle")]
    parts.append(_text(_LEFT, _TOP - 8, y_name, "middle"))
    for exponent in range(low_y, high_y + 1):
        _, y = to_pixels(xs[0], 2.0**exponent)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{2.0**exponent:g}", "end"))
    below = _HEIGHT - _BOTTOM + 18
    parts += [_text(to_pixels(x, ys[0])[0], below, f"{x:,g}", "middle") for x in sorted(set(xs))]
    for (name, line), colour in zip(lines.items(), _COLOURS * len(lines), strict=False):
        points = [to_pixels(x, y) for x, y in sorted(line.items())]
        path_points = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(_text(points[-1][0] + 8, points[-1][1] + 4, name, "start", colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    path.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n", encoding="utf-8")


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}" fill="{colour}">{text}</text>'
