"""How far phases are: by what they count, or by the time that they took at an earlier start."""

import time
from typing import Any

import pytest

from tokasaurus.messages.status import EngineLimits, PhaseDone, PhaseProgress, Ready, ServerTotals
from tokasaurus.startup_report import StartupReport, phase_key

WORKER = "model worker (rank 1)"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test changes."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_each_process_has_a_row_until_all_are_ready(clock: list[float]) -> None:
    report = StartupReport()
    report.begin_process("server")
    report.begin_process(WORKER)
    clock[0] += 3.0
    assert [(row.process, row.phase, row.seconds, row.share) for row in report.rows()] == [
        ("server", "imports", 3.0, None),
        (WORKER, "imports", 3.0, None),
    ]
    report.show_phase("server", PhaseDone("server", "imports", 3.0))
    report.show_phase("server", PhaseDone("server", "load tokenizer", 0.1))
    report.note_progress(WORKER, PhaseProgress("model worker", "weights"))
    clock[0] += 2.0
    report.note_progress(WORKER, PhaseProgress("model worker", "weights", 30_000_000, 120_000_000, "bytes"))
    (row,) = report.rows()
    assert (row.phase, row.seconds, row.percent, row.amount) == ("weights", 2.0, "25%", "30 of 120 MB")
    report.note_progress(WORKER, PhaseProgress("model worker", "warm-up", 3, 12, "forwards"))
    (row,) = report.rows()
    assert (row.phase, row.seconds, row.percent, row.amount) == ("warm-up", 0.0, "25%", "3 of 12 forwards")
    report.note_ready(Ready("server"), is_server=True)
    report.note_ready(Ready("manager", EngineLimits(100, 16, 64)), is_server=False)
    assert not report.rows()


def test_a_phase_without_parts_is_measured_by_the_last_start(clock: list[float]) -> None:
    first = StartupReport()
    first.begin_process("manager")
    clock[0] += 4.0
    first.show_phase("manager", PhaseDone("manager", "imports", 4.0))
    clock[0] += 8.0
    first.show_phase("manager", PhaseDone("manager", "load tokenizer", 7.0))
    report = StartupReport(start_times=dict(first.start_times))
    report.begin_process("manager")
    clock[0] += 1.0
    assert [row.percent for row in report.rows()] == ["~25%"]
    clock[0] += 50.0
    assert [row.percent for row in report.rows()] == ["~99%"], "it takes longer this time"
    report.show_phase("manager", PhaseDone("manager", "imports", 51.0))
    clock[0] += 4.0
    assert [row.percent for row in report.rows()] == ["~50%"]
    assert report.start_times[phase_key("manager", "imports")] == 51.0


def test_a_start_says_what_is_served_and_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [
        PhaseDone("model worker", "imports", 3.0),
        PhaseDone("model worker", "device", 0.1, "cpu, bfloat16, 2 threads"),
        PhaseDone("model worker", "gemm", 0.1, "few rows by kernels"),
        PhaseDone("model worker", "warm-up", 70.0),
        PhaseDone("model worker", "memory", 0.0, "weights 1 MiB planned, 2 MiB measured"),
    ]
    lines: list[str] = []
    monkeypatch.setattr(StartupReport, "show_line", lambda _self, line, *_: lines.append(line))
    shown = {}
    for shows_details in (False, True):
        report = StartupReport(shows_details=shows_details)
        lines.clear()
        for phase in phases:
            report.show_phase(WORKER, phase)
        shown[shows_details] = [line[14:30].strip() for line in lines]
        assert {phase_key(WORKER, phase.phase) for phase in phases} <= report.start_times.keys(), "all times are kept"
    assert shown == {False: ["device", "warm-up"], True: ["imports", "device", "gemm", "warm-up", "memory"]}


@pytest.mark.parametrize(
    ("num_left", "num_kept", "line"),
    [
        (299, 41_220, "batches:  299 lines go on at the next start, with 41,220 tokens that are kept"),
        (1, 0, "batches:  1 line goes on at the next start"),
        (0, 0, None),
    ],
)
def test_the_last_lines_say_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, num_left: int, num_kept: int, line: str | None
) -> None:
    lines: list[tuple[str, dict[str, Any] | None]] = []
    monkeypatch.setattr(StartupReport, "show_line", lambda _, line, fields=None: lines.append((line, fields)))
    report = StartupReport(ready_s=time.perf_counter() - 10, totals=ServerTotals(7, 1, 2, 30, 400, num_kept, num_left))
    report.show_summary()
    (requests, fields), (tokens, _), *rest = lines
    assert fields is not None
    assert (fields["kept_tokens"], fields["lines_left"]) == (num_kept, num_left)
    assert requests == "requests: 7 answered, 1 aborted, 2 failed"
    assert tokens.startswith("tokens:   30 in prompts, 400 generated in 10 s, ")
    assert rest == ([] if line is None else [(line, None)])
