"""The report: self-contained, with every server's figures and curves."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tokasaurus.cli import bench_main

pytest.importorskip("plotly", reason="the extra bench is not installed")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.sources: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in in ("h1", "h2"):
            self.headings.append(data.strip())
        if self._in == "td":
            self.cells.append(data)


def curves_of(text: str) -> list[dict[str, Any]]:
    """Every curve of the plots, as plotly's script is given it."""
    calls = re.findall(r"Plotly\.newPlot\(\s*\"[^\"]*\",\s*(\[.*?\]),\s*\{\"template\"", text, re.DOTALL)
    return [curve for call in calls for curve in json.loads(call)]


def test_a_report_has_tables_and_curves_and_needs_no_other_host(scripted_server: Any, tmp_path: Path) -> None:
    output, report, again = (tmp_path / name for name in ("runs.json", "report.html", "again.html"))
    url = scripted_server.base_url
    words = ["sharegpt", f"peer=a<b={url},other={url}", "rounds=2", "requests=4", "mean_tokens=3", "cap=6"]
    assert bench_main([*words, f"output={output}", f"html={report}"]) == 0
    assert bench_main(["compare", str(output), f"html={again}"]) == 0
    for file in (report, again):
        text = file.read_text()
        page = _Page()
        page.feed(text)
        assert page.sources == []
        assert "sharegpt: a<b, other" in page.headings
        assert len(list(filter(None, page.headings))) == 7
        assert "output tokens/s" in page.cells
        curves = curves_of(text)
        assert len(curves) == 6 * 4, "six plots of four runs"
        assert {curve["name"] for curve in curves} == {"a<b", "other"}
        assert all(len(curve["x"]) == len(curve["y"]) > 0 for curve in curves)
    runs = json.loads(output.read_text())["runs"]
    e2el = curves_of(report.read_text())[-4:]
    for run, curve in zip(runs, e2el, strict=True):
        assert curve["x"] == pytest.approx(sorted(1000 * request["latency_s"] for request in run["requests"]))
        assert curve["y"] == [25, 50, 75, 100]


def test_without_plotly_a_report_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tokasaurus.flags.find_spec", lambda _: None)
    assert bench_main(["monkeys", f"html={tmp_path / 'report.html'}"]) == 2
    assert "pip install plotly" in capsys.readouterr().err
