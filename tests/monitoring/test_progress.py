"""Times, and what each kind of display shows."""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokasaurus.messages.status import TimeLeft
from tokasaurus.monitoring.progress import (
    SECONDS_BETWEEN_LINES,
    BarDisplay,
    LineDisplay,
    NotebookDisplay,
    make_display,
    show_left,
    show_time,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (59.6, "1 min 0 s"), (130, "2 min 10 s"), (3600, "1 h 0 min"), (90_061, "25 h 1 min")],
)
def test_times(seconds: float | None, text: str) -> None:
    assert show_time(seconds) == text


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (None, "–"),
        ((115, 130), "2 min 2 s"),
        ((121, 242), "2–4 min"),
        ((30, 90), "30–90 s"),
        ((5400, 9000), "2–3 h"),
        ((86_400, 300_000), "1–3 d"),
        ((0.2, 0.4), "0 s"),
    ],
)
def test_a_time_left_is_a_range_while_it_is_not_sure(left: tuple[float, float] | None, text: str) -> None:
    assert show_left(None if left is None else TimeLeft(*left)) == text


def test_a_line_is_shown_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    display = make_display()
    assert isinstance(display, LineDisplay), "stderr is no terminal here"
    for second in range(25):
        now_s = 50.0 + second
        display.show(f"after {second} s", second, None)
    assert capsys.readouterr().err.splitlines() == ["after 0 s", "after 10 s", "after 20 s"]
    assert SECONDS_BETWEEN_LINES == 10.0


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    display = make_display()
    assert isinstance(display, BarDisplay)
    display.show("3 of 10 rows", 3, 10)
    assert not display.is_due()
    display.note("a note")
    display.close()
    shown = capsys.readouterr().err
    assert "a note" in shown
    assert "3 of 10 rows" in shown


def test_a_notebook_has_a_line_that_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for IPython, which need not be installed."""
    shown: list[tuple[str, Any]] = []
    handle = SimpleNamespace(update=lambda content, **_: shown.append(("update", content)))

    def display(content: Any, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        shown.append(("display", content))
        return handle

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    ipython.display = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    progress = make_display()
    assert isinstance(progress, NotebookDisplay)
    progress.show("1 < 2 rows", 1, 2)
    progress.show("2 rows", 2, None)
    assert [kind for kind, _ in shown] == ["display", "update"]
    assert shown[0][1]["text/plain"] == "1 < 2 rows"
    assert shown[0][1]["text/html"] == '<progress value="1" max="2"></progress> 1 &lt; 2 rows'
    assert shown[1][1]["text/html"] == "<progress></progress> 2 rows"
