"""What a user reads while a `map` runs."""

import time

import pytest

from tokasaurus.library.bulk import Progress
from tokasaurus.library.counts import Counts
from tokasaurus.library.map.progress import MapProgress, describe
from tokasaurus.messages.status import TimeLeft


def test_descriptions() -> None:
    counts = Counts(num_rows=500, num_skipped=20, num_finished=100, num_errors=3, output_tokens=8_000)
    rows = "120 of 2,000 rows done, 3 errors"
    assert describe(counts, None, 2_000, 800.0) == f"{rows}, 8,000 tokens, 800.0 tokens/s, – left"
    told = Progress(1_000, 71_600, TimeLeft(121, 241))
    assert describe(counts, told, 2_000, 800.0) == f"{rows}, 9,000 of 79,600 tokens, 800.0 tokens/s, 2–4 min left"
    assert describe(counts, None, None, 800.0) == "120 rows done, 3 errors, 8,000 tokens, 800.0 tokens/s"
    assert "9,000 tokens," in describe(counts, told, None, 800.0), "how many rows come is not known"
    assert describe(Counts(), None, 10, None) == "0 of 10 rows done, 0 errors, 0 tokens, – tokens/s, – left"
    assert "1 error," in describe(Counts(num_errors=1), None, 10, None)
    late = Progress(num_generated=700, num_expected=600, time_left=None)
    assert "8,700 of 8,700 tokens" in describe(counts, late, 2_000, 800.0), "more has come than was expected"


def test_the_last_line_shows_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    counts = Counts(num_rows=3)
    with MapProgress(3, is_shown=True) as progress:
        progress.update(counts, None)
        now_s = 2.0
        counts.num_finished, counts.output_tokens = 3, 90
        progress.update(counts, None)
    assert capsys.readouterr().err.splitlines() == [
        "0 of 3 rows done, 0 errors, 0 tokens, – tokens/s, – left",
        "3 of 3 rows done, 0 errors, 90 tokens, 45.0 tokens/s",
    ]
    counts = Counts(num_rows=30, num_finished=10, output_tokens=600)
    with MapProgress(30, is_shown=True, began_s=-1.0) as progress:  # shown late
        progress.update(counts, None)
    assert capsys.readouterr().err.splitlines()[0] == "10 of 30 rows done, 0 errors, 600 tokens, 200.0 tokens/s, – left"
    with MapProgress(3, is_shown=True):
        pass  # an error before anything was shown
    assert capsys.readouterr().err == ""
