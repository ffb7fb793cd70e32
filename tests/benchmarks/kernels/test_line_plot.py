"""Line plots: where the points are."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.kernels.line_plot import write_line_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_a_plot_puts_larger_values_further_up_and_right(tmp_path: Path) -> None:
    write_line_plot(tmp_path / "a.svg", "t", "x", "y", {"line": {256: 1.5, 64: 0.5, 1024: 3.0}})
    tree = ElementTree.parse(tmp_path / "a.svg")
    points = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in tree.iter(f"{SVG}circle")]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)
    heights = {text.text: float(text.get("y", "")) - 4 for text in tree.iter(f"{SVG}text") if text.text in "124"}
    assert heights["1"] > points[1][1] > heights["2"] > points[2][1] > heights["4"]
