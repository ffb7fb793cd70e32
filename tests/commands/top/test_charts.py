"""Charts, read back from their characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.commands.top.charts import Area, area_chart, cells_of_shares, sparkline
from tokasaurus.commands.top.history import Curve

EIGHTHS = " ▁▂▃▄▅▆▇█"


def heights(rows: list[str]) -> list[int]:
    """Filled eighths of each column; every cell below a filled one must be full."""
    found = []
    for column in zip(*rows, strict=True):
        levels = [EIGHTHS.index(char) for char in reversed(column)]
        filled = sum(levels)
        assert levels == [min(8, max(0, filled - 8 * row)) for row in range(len(levels))]
        found.append(filled)
    return found


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20), st.integers(1, 30), st.integers(1, 8))
def test_an_area_has_the_height_of_its_largest_value_in_each_column(ys: list[int], width: int, height: int) -> None:
    curve = Curve(tuple(float(10 * place) for place in range(len(ys))), tuple(map(float, ys)))
    end = curve.xs[-1]
    rows = area_chart([Area(curve, "cyan")], None, "", 0.0, end, 1000.0, width, height)
    found = heights([row.plain for row in rows])
    for column, filled in enumerate(found):
        value = curve.highest(end * column / width, end * (column + 1) / width)
        assert value is not None
        assert abs(filled - value / 1000 * height * 8) <= (1 if 0 < value < 1000 / height / 8 else 0.5 + 1e-9)
    assert max(found) == max(0 if max(ys) == 0 else 1, round(max(ys) / 1000 * height * 8)), "no peak is lost"


def dots_of(rows: list[str], height: int) -> dict[int, set[int]]:
    """Rows of dots, from the bottom, by half column."""
    dots: dict[int, set[int]] = {}
    sides = {0: (0x40, 0x04, 0x02, 0x01), 1: (0x80, 0x20, 0x10, 0x08)}
    for row, text in enumerate(rows):
        for column, char in enumerate(text):
            bits = ord(char) - 0x2800 if 0x2800 <= ord(char) <= 0x28FF else 0
            for side, masks in sides.items():
                for level, mask in enumerate(masks):
                    if bits & mask:
                        dots.setdefault(2 * column + side, set()).add(4 * (height - 1 - row) + level)
    return dots


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 100), st.integers(0, 100))
def test_a_line_has_one_dot_for_each_half_column_where_it_is_defined(
    width: int, height: int, first: int, last: int
) -> None:
    line = Curve((0.0, 50.0), (float(first), float(last)))
    rows = area_chart([], line, "yellow", -50.0, 100.0, 100.0, width, height)
    dots = dots_of([row.plain for row in rows], height)
    for half in range(2 * width):
        left, right = (-50 + 150 * place / (2 * width) for place in (half, half + 1))
        value = line.highest(left, right)
        expected = None if value is None else {max(0, round(value / 100 * height * 4) - 1)}
        assert dots.get(half) == expected


def test_a_line_over_an_area_is_seen_with_and_without_colours() -> None:
    area, line = Area(Curve((0.0, 10.0), (10.0, 10.0)), "cyan"), Curve((0.0, 10.0), (5.0, 5.0))
    (_, coloured), (_, plain), (_, ascii_only) = (
        area_chart([area], line, "yellow", 0.0, 10.0, 10.0, 4, 2, *look)
        for look in ((True, False), (False, False), (False, True))
    )
    assert {span.style for span in coloured.spans} == {"yellow on cyan"}
    assert (plain.plain, ascii_only.plain) == ("░" * 4, "o" * 4)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(0, 80))
def test_shares_fill_the_bar_and_are_off_by_less_than_a_cell(shares: list[int], width: int) -> None:
    cells = cells_of_shares(shares, width)
    if sum(shares) == 0:
        assert cells == [0] * len(shares)
        return
    assert sum(cells) == width
    for share, count in zip(shares, cells, strict=True):
        assert abs(count - share / sum(shares) * width) <= 1


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 7, 14], 5, "  ▁▅█"),
        ([1, 0, 7, 14], 3, "▁▅█"),
        ([0, 0], 2, "▁▁"),
        ([7, None, 14], 4, " ▅ █"),
        ([None, None], 2, "  "),
        ([], 2, "  "),
        ([3], 0, ""),
    ],
)
def test_sparklines_end_at_the_right(values: list[float | None], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected
