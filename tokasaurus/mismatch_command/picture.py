"""A picture of the figures: the mean difference of each mode, and how it goes with the position in the completion."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from tokasaurus.mismatch_command.figures import ModeFigures

_WIDTH, _ROW, _LEFT, _PLOT = 860, 26, 230, 240
_COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#d4a017", "#33658a", "#a23b72")


def draw(modes: Sequence[ModeFigures], title: str) -> str:
    """An SVG."""
    bars, lines = _bars(modes, 50), _lines(modes, 90 + _ROW * len(modes))
    height = 130 + _ROW * len(modes) + _PLOT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="13">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            _text(20, 26, title, "font-weight:bold"),
            *bars,
            *lines,
            "</svg>\n",
        ]
    )


def _bars(modes: Sequence[ModeFigures], top: int) -> list[str]:
    """A bar of the mean for each mode, with a mark where the largest difference would need another scale."""
    longest = max(mode.mean for mode in modes) or 1.0
    drawn = []
    for number, mode in enumerate(modes):
        y, width = top + _ROW * number, 300 * mode.mean / longest
        drawn += [
            _text(20, y + 14, mode.mode),
            f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 8}" fill="{_color(number)}"/>',
            _text(int(_LEFT + width + 8), y + 14, f"mean {mode.mean:.2g}, largest {mode.largest:.2g}"),
        ]
    return drawn


def _lines(modes: Sequence[ModeFigures], top: int) -> list[str]:
    """The mean by position."""
    highest = max(part.mean for mode in modes for part in mode.parts) or 1.0
    last = max(part.first_position for mode in modes for part in mode.parts) or 1
    bottom, right = top + _PLOT - 40, _WIDTH - 40
    drawn = [
        _text(20, top, "mean difference by position in the completion", "font-weight:bold"),
        f'<path d="M{_LEFT},{top + 10} V{bottom} H{right}" stroke="black" fill="none"/>',
        _text(20, top + 24, f"{highest:.2g}"),
        _text(20, bottom, "0"),
        _text(right - 40, bottom + 18, f"token {last}"),
    ]
    for number, mode in enumerate(modes):
        points = " ".join(
            f"{_LEFT + (right - _LEFT) * part.first_position / last:.1f},"
            f"{bottom - (bottom - top - 20) * part.mean / highest:.1f}"
            for part in mode.parts
        )
        drawn.append(f'<polyline points="{points}" stroke="{_color(number)}" fill="none" stroke-width="2"/>')
    return drawn


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" style="{style}">{escape(text)}</text>'
