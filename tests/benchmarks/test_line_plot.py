"""Line plots: where the points are."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.line_plot import LinePlot, write_line_plots

SVG = "{http://www.w3.org/2000/svg}"


def test_a_plot_puts_larger_values_further_up_and_right(tmp_path: Path) -> None:
    write_line_plots(tmp_path / "a.svg", [LinePlot("t", "x", "y", {"line": {256: 1.5, 64: 0.5, 1024: 3.0}})])
    tree = ElementTree.parse(tmp_path / "a.svg")
    points = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in tree.iter(f"{SVG}circle")]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)
    heights = {text.text: float(text.get("y", "")) - 4 for text in tree.iter(f"{SVG}text") if text.text in "124"}
    assert heights["1"] > points[1][1] > heights["2"] > points[2][1] > heights["4"]


def test_names_of_lines_that_end_together_do_not_cover_each_other(tmp_path: Path) -> None:
    lines = {f"line {index}": {1: 1.0 + index, 2: 4.0 + index / 100} for index in range(5)}
    write_line_plots(tmp_path / "a.svg", [LinePlot("first", "x", "y", lines), LinePlot("second", "x", "y", lines)])
    first, second = ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}g")
    for plot in (first, second):
        heights = sorted(float(text.get("y", "")) for text in plot.iter(f"{SVG}text") if text.text in lines)
        assert len(heights) == len(lines)
        assert all(below - above >= 13 for above, below in itertools.pairwise(heights))
