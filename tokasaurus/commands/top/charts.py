"""Numbers as characters: sparklines, bars, and an area with a line over it. Knows no samples."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tokasaurus.commands.top.history import Curve

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-:=+*#"
_DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
"""Bits of a braille character's dots: rows from the bottom, (left, right)."""


@dataclass(frozen=True, slots=True)
class Area:
    """A curve with all below it filled."""

    curve: Curve
    style: str


def sparkline(values: Sequence[float | None], width: int, ascii_only: bool = False) -> str:
    """The newest `width` values, the last at the right end; the largest of them has the full height. None is a gap."""
    shown = values[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0)
    levels = _ASCII_BARS if ascii_only else _BARS
    bars = [" " if value is None else levels[round(value / top * 7) if top > 0 else 0] for value in shown]
    return "".join(bars).rjust(width)


def cells_of_shares(shares: Sequence[float], width: int) -> list[int]:
    """`width` cells divided by the shares, whose sum may be anything; each is off by less than one cell."""
    whole = sum(shares)
    if whole <= 0:
        return [0] * len(shares)
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(total / whole * width))
    return [end - start for start, end in itertools.pairwise(ends)]


def area_chart(
    areas: Sequence[Area],
    line: Curve | None,
    line_style: str,
    start: float,
    end: float,
    top: float,
    width: int,
    height: int,
    has_colours: bool = True,
    ascii_only: bool = False,
) -> list[Text]:
    """Rows of the chart of x from start to end and y from 0 to top, the highest first. A column shows the largest value
    within it, so that no peak is lost. Where the line runs over an area, it is seen by its colour, or without colours
    as a gap in the area."""
    columns = []
    for column in range(width):
        left, right = (start + (end - start) * (column + side) / width for side in (0, 1))
        highest = [(value, area.style) for area in areas if (value := area.curve.highest(left, right)) is not None]
        value, style = max(highest, default=(0.0, ""))
        middle = (left + right) / 2
        halves = ((left, middle), (middle, right))
        levels = [None if line is None else _line_level(line.highest(*half), top, height) for half in halves]
        columns.append((_level(value, top, height, 8), style, levels))
    rows = []
    for row in reversed(range(height)):
        text = Text(no_wrap=True)
        for eighths, style, levels in columns:
            filled = min(8, max(0, eighths - 8 * row))
            dots = sum(
                _DOTS[level - 4 * row][side]
                for side, level in enumerate(levels)
                if level is not None and 0 <= level - 4 * row < 4
            )
            text.append(*_cell(filled, style, dots, line_style, has_colours, ascii_only))
        rows.append(text)
    return rows


def _level(value: float, top: float, height: int, parts: int) -> int:
    """The value in parts of a row; one part at least if it is not 0."""
    if value <= 0 or top <= 0:
        return 0
    return max(1, min(height * parts, round(value / top * height * parts)))


def _line_level(value: float | None, top: float, height: int) -> int | None:
    return None if value is None else max(0, _level(value, top, height, 4) - 1)


def _cell(filled: int, style: str, dots: int, line_style: str, has_colours: bool, ascii_only: bool) -> tuple[str, str]:
    """(character, style)."""
    if ascii_only:
        return ("o", line_style) if dots else (" .:#"[(filled + 2) // 3], style)
    if not dots:
        return _EIGHTHS[filled], style
    if filled == 8:
        return (chr(0x2800 + dots), f"{line_style} on {style}") if has_colours else ("░", "")
    return chr(0x2800 + dots), line_style
