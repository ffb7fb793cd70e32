"""`python -m tests.gpu`: its parts, and what it does with tests that fail, hang or kill their process."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PART_NAMES
from tests.gpu import __main__ as gpu
from tests.gpu import part_runner
from tests.gpu.journal import read_journal
from tests.gpu.part_runner import FAILED, INTERRUPTED, NO_TESTS, NOT_ALL_RUN, ROOT, PartResult, collect_part, run_part
from tests.gpu.parts import HERE, PART_MINUTES, PARTS, TestFile

pytestmark = pytest.mark.cuda_path

HANGS_IN_C = """
import signal
import time
def test_waits_where_no_signal_arrives():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)
"""


def part_of(directory: Path, limit_s: float = 20.0, **sources: str) -> tuple[TestFile, ...]:
    files = []
    for name, source in sources.items():
        path = directory / f"test_{name}.py"
        path.write_text(source)
        files.append(TestFile(path, limit_s, name))
    return tuple(files)


def by_name(result: PartResult) -> dict[str, str]:
    return {test.rpartition("::")[2]: outcome for test, outcome in result.outcomes.items()}


def test_every_file_is_in_one_part() -> None:
    files = [file.path for part in PARTS.values() for file in part]
    assert sorted(files) == sorted(HERE.glob("test_*.py"))
    assert PART_MINUTES * 60 + part_runner._EXTRA_S < 8 * 60
    assert len(PARTS) == 4


def test_a_part_counts_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    source = """
import pytest
def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("no")
@pytest.fixture
def broken(): raise ValueError
def test_is_not_set_up(broken): pass
@pytest.fixture
def breaks_later():
    yield
    raise ValueError
def test_is_not_torn_down(breaks_later): pass
"""
    result = run_part(part_of(tmp_path, all=source), [], 60)
    assert by_name(result) == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_is_not_set_up": "failed",
        "test_is_not_torn_down": "failed",
    }
    assert result.exit_code == FAILED
    assert result.not_run == []
    assert result.line("all", 3.2) == "all: 1 passed, 3 failed, 1 skipped, 3 s"


def test_a_kept_journal_has_the_reason_of_a_failure_before_the_last_test(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("of an earlier run\n")
    source = f"""
from pathlib import Path
def test_fails(): assert 1 + 1 == 3
def test_reads(): assert "1 + 1" in Path({str(kept)!r}).read_text()
"""
    result = run_part(part_of(tmp_path, all=source), [], 60, kept=kept)
    assert by_name(result) == {"test_fails": "failed", "test_reads": "passed"}
    [failed] = [event for event in read_journal(kept) if event.get("outcome") == "failed"]
    assert "assert (1 + 1) == 3" in failed["why"]


@pytest.mark.long
def test_arguments_go_to_pytest(tmp_path: Path) -> None:
    part = part_of(tmp_path, many="def test_one(): pass\ndef test_two(): assert False\ndef test_three(): assert False")
    assert by_name(run_part(part, ["-k", "one"], 60)) == {"test_one": "passed"}
    assert run_part(part, ["-k", "none_of_them"], 60).exit_code == NO_TESTS
    stopped = run_part(part, ["-x"], 60)
    assert by_name(stopped) == {"test_one": "passed", "test_two": "failed"}
    assert (stopped.exit_code, len(stopped.not_run)) == (FAILED, 1)
    assert run_part(part, ["--no-such-option"], 60).exit_code == 4


def test_a_test_that_kills_its_process_costs_only_itself(tmp_path: Path) -> None:
    source = "import os\ndef test_a(): pass\ndef test_dies(): os.abort()\ndef test_b(): pass"
    result = run_part(part_of(tmp_path, all=source), ["-p", "no:faulthandler"], 60)
    assert by_name(result) == {"test_a": "passed", "test_dies": "killed", "test_b": "passed"}
    assert (result.exit_code, result.not_run) == (FAILED, [])


@pytest.mark.long
def test_a_test_that_hangs_in_c_ends_after_its_limit_with_its_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = HANGS_IN_C.replace(
        "    time.sleep",
        f"    import subprocess\n    child = subprocess.Popen(['sleep', '300'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n    time.sleep",
    )
    started_s = time.monotonic()
    result = run_part(part_of(tmp_path, 1.0, a=hangs, b="def test_b(): pass"), [], 60, grace_s=1.0)
    assert time.monotonic() - started_s < 30
    assert by_name(result) == {"test_waits_where_no_signal_arrives": "killed", "test_b": "passed"}
    assert result.exit_code == FAILED
    assert "in test_waits_where_no_signal_arrives" in capfd.readouterr().err
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the child of the test is still alive"
        time.sleep(0.05)


def test_a_test_that_hangs_in_python_fails_after_its_limit(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout")
    source = "import time\ndef test_a(): time.sleep(60)\ndef test_b(): pass"
    result = run_part(part_of(tmp_path, 1.0, all=source), [], 60)
    assert by_name(result) == {"test_a": "failed", "test_b": "passed"}


@pytest.mark.long
def test_a_test_at_work_at_the_end_of_the_time_is_killed_and_the_rest_not_run(tmp_path: Path) -> None:
    source = "import time\ndef test_a(): time.sleep(60)\ndef test_b(): pass"
    started_s = time.monotonic()
    result = run_part(part_of(tmp_path, 90, all=source, more="def test_c(): pass"), [], 6.0)
    assert time.monotonic() - started_s < 6 + part_runner._EXTRA_S
    assert by_name(result) == {"test_a": "killed"}
    assert [test.rpartition("::")[2] for test in result.not_run] == ["test_b", "test_c"]
    assert result.exit_code == FAILED


@pytest.mark.long
def test_no_test_begins_when_no_time_is_left(tmp_path: Path) -> None:
    source = f"import time\ndef test_a(): time.sleep({time.time() + 7.5} - time.time())\ndef test_b(): pass"
    result = run_part(part_of(tmp_path, all=source), [], 8.0)
    assert by_name(result) == {"test_a": "passed"}
    assert result.exit_code == NOT_ALL_RUN
    assert result.line("all", 8.0) == "all: 1 passed, 1 not run, 8 s"


@pytest.mark.long
def test_a_broken_cuda_context_ends_the_process_and_not_the_part(tmp_path: Path) -> None:
    """A module that looks like torch after an illegal access in a kernel."""
    source = """
import sys
import types
def synchronize():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_a(): pass
def test_breaks():
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    assert False
def test_b(): assert "torch" not in sys.modules
"""
    result = run_part(part_of(tmp_path, all=source), [], 60)
    assert by_name(result) == {"test_a": "passed", "test_breaks": "failed", "test_b": "passed"}


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    part = part_of(tmp_path, a="def test_a(): pass", c="import no_such_module\ndef test_c(): pass")
    assert run_part(part, [], 60).exit_code == FAILED


def test_a_dry_run_runs_nothing_and_finds_files_that_cannot_be_imported(tmp_path: Path) -> None:
    assert collect_part(part_of(tmp_path, a="def test_a(): assert False\ndef test_b(): pass"), []) == (2, 0)
    assert collect_part(part_of(tmp_path, c="import no_such_module\ndef test_c(): pass"), [])[1] != 0


@pytest.mark.long
@pytest.mark.parametrize("name", PARTS)
def test_the_dry_run_of_a_part_works_alone(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each file can be imported and has tests."""
    assert gpu.main([name, "--dry-run"]) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith(f"{name}: ")]
    num_tests, word = line.removeprefix(f"{name}: ").split()
    assert int(num_tests) >= len(PARTS[name])
    assert word == "tests"


@pytest.mark.parametrize(("heading", "parts"), [("Tests", PARTS), ("Measurements", PART_NAMES)])
def test_the_page_lists_each_part(heading: str, parts: Iterable[str]) -> None:
    section = (ROOT / "docs/gpu.md").read_text().partition(f"\n## {heading}: ")[2].partition("\n## ")[0]
    assert {*parts} <= {*re.findall(r"^- `([^`]+)`:", section, re.MULTILINE)}


@pytest.mark.long
def test_sigterm_ends_what_runs_and_says_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b():\n    open('begun', 'w').close()\n    time.sleep(60)\n"
        "def test_c(): pass".replace("'begun'", repr(str(tmp_path / "begun")))
    )
    program = f"""
import sys
from pathlib import Path
import torch
from benchmarks.gpu.__main__ import PART_NAMES
from tests.gpu import __main__ as gpu
from tests.gpu.parts import TestFile
torch.cuda.is_available = lambda: True
gpu.PARTS.clear()
gpu.PARTS["only"] = (TestFile(Path({str(tmp_path / "test_a.py")!r}), 60, ""),)
sys.exit(gpu.main(["only"]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert output.splitlines()[-1].startswith("only: 1 passed, 1 killed, 1 not run,")


Call = tuple[list[str], list[str], float, Path | None]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What `main` would run: parts, arguments of pytest, minutes and the directory of the journals."""
    calls: list[Call] = []
    monkeypatch.setattr(gpu, "run", lambda *call: calls.append(call) or 0)
    return calls


def test_parts_come_first_and_pytests_arguments_after(ran: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert gpu.main(["kernels", "-k", "attention", "-x"]) == 0
    assert gpu.main(["servers", "attention", "--minutes", "2"]) == 0
    assert gpu.main(["servers", "--journal=kept", "--minutes=2", "-x"]) == 0
    assert gpu.main(["--journal", "kept"]) == 0
    assert gpu.main(["-v"]) == 0
    assert ran == [
        (list(PARTS), [], PART_MINUTES, None),
        (["kernels"], ["-k", "attention", "-x"], PART_MINUTES, None),
        (["servers", "attention"], [], 2.0, None),
        (["servers"], ["-x"], 2.0, Path("kept")),
        (list(PARTS), [], PART_MINUTES, Path("kept")),
        (list(PARTS), ["-v"], PART_MINUTES, None),
    ]
    assert gpu.main(["kernel"]) == 4
    assert "attention, kernels, servers" in capsys.readouterr().err
    assert gpu.main(["kernels", "--minutes=-1"]) == 4


def test_without_a_device_one_line_says_so_but_help_and_list_work(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu.main(["kernels", "-x"]) == 0
    assert capsys.readouterr().out == "skipped: torch sees no CUDA device\n"
    assert gpu.main(["--help"]) == 0
    assert "--dry-run" in capsys.readouterr().out
    assert gpu.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(file.what in listed for part in PARTS.values() for file in part)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, FAILED], FAILED), ([NO_TESTS, 0], 0), ([NO_TESTS, NO_TESTS], 5), ([NOT_ALL_RUN, FAILED], 1)],
)
def test_the_exit_code_is_the_worst_of_the_parts(codes: list[int], expected: int) -> None:
    assert gpu.worst_code(codes) == expected
