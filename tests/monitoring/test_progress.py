"""Speeds, times, and what each kind of display shows."""

import random
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokasaurus.monitoring.progress import (
    SECONDS_BETWEEN_LINES,
    BarDisplay,
    LineDisplay,
    NotebookDisplay,
    Speed,
    make_display,
    show_time,
)


@pytest.mark.parametrize("seed", range(5))
def test_speed_is_that_of_about_the_last_minute(seed: int) -> None:
    chance = random.Random(seed)
    speed, samples = Speed(), []
    now_s, lines, tokens = 0.0, 40, 9000  # from a former run: they count for nothing
    for _ in range(200):
        samples.append((now_s, lines, tokens))
        speed.add(now_s, lines, tokens)
        now_s += chance.uniform(0.1, 3)
        lines, tokens = lines + chance.randint(1, 9), tokens + chance.randint(10, 900)
    recent = [sample for sample in samples if samples[-1][0] - sample[0] <= 60]
    seconds = recent[-1][0] - recent[0][0]
    assert speed.tokens_per_s() == pytest.approx((recent[-1][2] - recent[0][2]) / seconds)
    assert speed.items_per_s() == pytest.approx((recent[-1][1] - recent[0][1]) / seconds)


def test_tokens_that_a_dead_engine_generates_again_do_not_count_twice() -> None:
    speed = Speed()
    for second, num_tokens in enumerate((0, 100, 200, 0, 100, 200, 300, 400)):
        speed.add(second, 0, num_tokens)
    assert speed.tokens_per_s() == pytest.approx(400 / 7)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (59.6, "1 min 0 s"), (130, "2 min 10 s"), (3600, "1 h 0 min"), (90_061, "25 h 1 min")],
)
def test_times(seconds: float | None, text: str) -> None:
    assert show_time(seconds) == text


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
