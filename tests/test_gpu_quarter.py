"""`make gpu-quarter`, with tiny models on the CPU: what it does, and what is in its files when it is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import quarter
from tests.gpu.parts import PARTS
from tests.gpu.quarter import Ended, Journal, Step, read_rows

pytestmark = pytest.mark.cuda_path

WHOLE_S = 30.0
"""About how long a dry run of the first call takes."""


def processes_of(session: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[3]) == session and words[0] != "Z":
                yield int(stat.parent.name)


def kill_all_of(session: int) -> None:
    """As a machine ends that is taken back: every process at once, those included that others started."""
    while pids := list(processes_of(session)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def first_call(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.gpu.quarter", "first", "--dry-run", "--output", str(directory / "out")]
    command += ["--work", str(directory / "work"), "--kit", str(directory / "no-kit"), *arguments]
    with (directory / "shown").open("w") as shown:
        return subprocess.Popen(command, stdout=shown, stderr=shown, text=True, start_new_session=True)


def steps_in(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each step, by its name."""
    steps: dict[str, list[dict[str, Any]]] = {}
    name = ""
    for row in rows:
        if "step" in row and not row["step"].startswith("weights"):
            name = row["step"]
        elif "step" not in row:
            steps[name].append(row)
        steps.setdefault(name, [])
    return steps


def check_files_after_a_kill(directory: Path) -> None:
    """Every witness of something done (a line shown, a trace, a phase in the log) has its rows in the file."""
    out, traces = directory / "out", directory / "work" / "traces"
    if not (out / "first.jsonl").exists():
        return
    rows = read_rows(out / "first.jsonl")
    steps, log = steps_in(rows), (out / "first.log").read_text()
    ended = {row["step"]: row for row in rows if "exit_code" in row}
    shown = (directory / "shown").read_text()
    for line in shown.splitlines():
        if "exit_code" in line:
            assert ended[line.split()[2].rstrip(":")]["exit_code"] == 0, line
    for name in (step for step in steps if step.startswith("profile-")):
        kept = {path.name for path in (traces / name.removeprefix("profile-")).glob("rows-*.gz")}
        measured = [f"rows-{row['num_rows']}.json.gz" for row in steps[name]]
        assert set(measured) <= kept
        assert len(measured) >= len(kept) - 1, "the one at work"
        if name in ended:
            assert len(measured) == len(quarter.TINY_ROWS)
    packed = [name for name in ended if name.startswith("profile-")]
    if len(packed) > 1:  # the newest one may just be packed
        with tarfile.open(out / "traces.tar") as tar:
            names = tar.getnames()
        for name in packed[:-1]:
            assert f"traces/{name.removeprefix('profile-')}/rows-4.json.gz" in names
    phases_by_step = [text.partition("\n") for text in log.split("== ")[1:]]
    for name, _, phases in phases_by_step:
        if name.startswith("check-"):
            found = {row.get("feature") for row in steps[name]}
            for phase in ("layers", "sampling"):
                assert phase in found or f"\n{phase} " not in phases


def kill_at_random(directory: Path, seed: int) -> None:
    process = first_call(directory)
    try:
        time.sleep(random.Random(seed).uniform(1, WHOLE_S))
    finally:
        kill_all_of(process.pid)
        process.wait()
    check_files_after_a_kill(directory)


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_at_any_moment_costs_only_what_was_running(seed: int, tmp_path: Path) -> None:
    kill_at_random(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_kill_at_ten_more_moments_costs_only_what_was_running(seed: int, tmp_path: Path) -> None:
    kill_at_random(tmp_path, seed)


@pytest.mark.long
def test_both_calls_leave_all_their_results(tmp_path: Path) -> None:
    assert first_call(tmp_path, "page_size=8").wait(300) == 0
    check_files_after_a_kill(tmp_path)
    out = tmp_path / "out"
    rows = read_rows(out / "first.jsonl")
    steps = steps_in(rows)
    profiles = [f"profile-{model.name}-own" for model in quarter.MODELS]
    checks = [f"check-{model.name}" for model in quarter.MODELS]
    between = [name for pair in zip(checks, profiles, strict=True) for name in pair]
    assert list(steps) == ["machine", "kit", *between, "end"]
    for name in checks:
        assert steps[name][-1] == {"switched_off": []}
    for name in profiles:
        assert [(row["num_rows"], row["num_context"]) for row in steps[name]] == [(1, 1000), (4, 1000)]
    commands = [row["command"] for row in rows if "command" in row]
    assert all("log_level=debug" in command and "page_size=8" in command for command in commands)
    log = (out / "first.log").read_text()
    assert " planned, " in log, "the memory of each start"
    assert not list(tmp_path.rglob("*=*"))
    second = ["second", "--dry-run", "--output", str(out), "--work", str(tmp_path / "work"), "--kit", str(tmp_path)]
    assert quarter.main([*second, "max_seqs_per_forward=8", "max_tokens_per_forward=256"]) == 0, (
        out / "second.log"
    ).read_text()
    assert "attention: 2 tests\n" in (out / "second.log").read_text(), "FlashInfer's windows"
    measured = json.loads((out / "workloads.json").read_text())["parts"]
    assert [part["part"] for part in measured if part["flags"]] == ["start", "groups", "sharegpt"]
    assert {part["status"] for part in measured} == {"measured"}
    (tmp_path / "work" / quarter.WRONG).write_text('["triton_layers"]')
    assert quarter.main(second) == 0
    assert "kernels: " in (out / "second.log").read_text()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal("first", tmp_path, time.monotonic() + 60)


def test_a_row_that_a_kill_has_cut_spoils_no_other(journal: Journal) -> None:
    program = """
import os, signal
print('{"feature": "a", "failure": null}', flush=True)
print("a library prints something", flush=True)
print('{"feature": "b", "fail', end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = journal.run(Step("check", ("-c", program), 30))
    assert ended.rows == [{"feature": "a", "failure": None}]
    assert ended.exit_code != 0
    assert journal.num_failed == 1
    rows = read_rows(journal.rows_path)
    assert [row.get("step", row.get("feature")) for row in rows] == ["check", "a", "check"]


def test_a_step_that_outlives_its_call_writes_nothing_among_the_rows_of_the_next(journal: Journal) -> None:
    journal.write("check")
    with journal.rows_path.open("a") as of_the_step:
        following = Journal("first", journal.output, journal.deadline_s)
        print('{"switched_off": []}', file=of_the_step)
    following.write("machine")
    assert [row["step"] for row in read_rows(following.rows_path)] == ["machine"]
    before = read_rows(journal.output / "first.jsonl.before")
    assert [next(iter(row)) for row in before] == ["step", "switched_off"]


def test_a_step_ends_at_its_limit_with_what_it_has_started(journal: Journal) -> None:
    program = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print('{"pid": %d}' % child.pid, flush=True)
print("what it waits for", file=sys.stderr, flush=True)
child.wait()
"""
    began_s = time.monotonic()
    ended = journal.run(Step("hangs", ("-c", program), 2))
    assert time.monotonic() - began_s < 15
    [row] = ended.rows
    assert ended.exit_code == 124
    deadline = time.monotonic() + 10
    while Path(f"/proc/{row['pid']}").exists() and " Z " not in Path(f"/proc/{row['pid']}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "== hangs\nwhat it waits for\n" in journal.log_path.read_text()


def test_a_step_that_no_time_is_left_for_is_named(tmp_path: Path) -> None:
    journal = Journal("first", tmp_path, time.monotonic() + quarter.MIN_SECONDS - 1)
    assert journal.run(Step("late", ("-c", "print(1)"), 30)) == (None, [])
    [row] = read_rows(journal.rows_path)
    assert (row["step"], row["reason"]) == ("late", "no time is left")
    assert journal.num_failed == 1


def test_after_four_minutes_the_first_check_and_profile_are_over() -> None:
    first, _ = quarter.MODELS
    assert first.check_s + first.profile_s <= 240 - 30
    assert first.rows == (1, 64, 256, 1024)
    assert quarter.SECONDS["first"] <= 500
    assert quarter.SECONDS["second"] <= 200


def test_a_check_that_found_something_or_was_cut_asks_for_tests() -> None:
    right, wrong = ({"feature": name, "name": None, "failure": why} for name, why in (("a", None), ("b", "differs")))
    end: dict[str, Any] = {"switched_off": []}
    assert quarter.find_wrong(Ended(0, [{"device": "x"}, right, end])) == []
    assert quarter.find_wrong(Ended(1, [right, wrong, {"switched_off": ["c"]}])) == ["b", "c"]
    assert quarter.find_wrong(Ended(124, [right])) == ["start"]
    assert quarter.find_wrong(Ended(None, [])) == ["start"]
    assert quarter.find_wrong(Ended(2, [{"device": "x"}, end])) == ["start"], "a flag or the model was refused"


@pytest.mark.parametrize("feature", [*quarter.TESTS_OF, "start"])
def test_each_feature_has_tests(feature: str) -> None:
    command = quarter.tests_of([feature], 190, Path("kept"))
    begin, end = command.index("tests.gpu") + 1, command.index("-k")
    *parts, minutes, kept = command[begin:end]
    assert parts
    assert kept == "--journal=kept"
    assert float(minutes.partition("=")[2]) * 60 * len(parts) <= 190
    for part in parts:
        names = [file.path.name for file in PARTS[part]]
        assert any(subject in name for subject in command[end + 1].split(" or ") for name in names)


def test_the_kit_goes_into_a_folder_where_this_python_takes_none(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    kit, work = tmp_path / "kit", tmp_path / "work"
    kit.mkdir()
    script = """
import pathlib, sys
if "--target" not in sys.argv:
    sys.exit("error: externally-managed-environment")
pathlib.Path(sys.argv[sys.argv.index("--target") + 1]).mkdir(parents=True)
"""
    (kit / "install.py").write_text(script)
    quarter.install_kit(kit, work, journal, is_dry_run=False)
    assert os.environ["PYTHONPATH"] == str(work / "site")
    assert (work / "site").is_dir()
    codes = {row["step"]: row["exit_code"] for row in read_rows(journal.rows_path) if "exit_code" in row}
    assert codes == {"kit": 1, "kit-in-a-folder": 0}
    assert "externally-managed" in journal.log_path.read_text()


def test_it_needs_no_package_before_the_kit_is_installed() -> None:
    command = [sys.executable, "-S", "-m", "tests.gpu.quarter", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=quarter.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "first | second" in done.stdout
