"""Runs one part in pytest processes, one after the other: a test that kills its process costs only itself."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.journal import Settings, read_journal
from tests.gpu.parts import Part

ROOT = Path(__file__).parents[2]
FAILED, INTERRUPTED, NO_TESTS = 1, 2, 5
"""Exit codes, with pytest's meaning."""
NOT_ALL_RUN = 6
"""Exit code if nothing failed, but time was up before the last test."""
_PYTEST_FAILED = (3, 4)
"""An error in pytest, or in its arguments."""
_EXTRA_S = 10.0
"""Time after the deadline in which pytest may end by itself."""


@dataclass(slots=True)
class PartResult:
    outcomes: dict[str, str] = field(default_factory=dict)
    """By test: "passed", "failed", "skipped", or "killed" if its process ended before it."""
    not_run: list[str] = field(default_factory=list)
    exit_code: int = 0

    def line(self, name: str, seconds: float) -> str:
        found = [*self.outcomes.values(), *(["not run"] * len(self.not_run))]
        counts = {what: found.count(what) for what in ("passed", "failed", "killed", "skipped", "not run")}
        shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no test"
        return f"{name}: {shown}, {seconds:.0f} s"


def run_part(
    part: Part, arguments: Sequence[str], limit_s: float, grace_s: float = 15.0, kept: Path | None = None
) -> PartResult:
    """arguments: of pytest. limit_s: seconds for the whole part. grace_s: see Settings. kept: the journal, which is
    replaced and stays there."""
    deadline = time.time() + limit_s
    with tempfile.TemporaryDirectory() as directory:
        journal = kept or Path(directory) / "journal"
        journal.unlink(missing_ok=True)
        limits_s = {str(file.path): file.limit_s for file in part}
        settings = Settings(str(journal), deadline, limits_s, grace_s)
        while True:
            num_events = len(read_journal(journal))
            code = _run_pytest(part, arguments, settings)
            events = read_journal(journal)
            result, new_events = _result(events, code), events[num_events:]
            is_cut = "ended" not in new_events[-1] if new_events else True
            may_go_on = is_cut or any("restart" in event for event in new_events)
            has_moved = any("begun" in event for event in new_events)
            if not (result.not_run and may_go_on and has_moved) or code is None or time.time() >= deadline:
                return result
            print(f"pytest starts again with the {len(result.not_run)} tests that are left", flush=True)


def collect_part(part: Part, arguments: Sequence[str]) -> tuple[int, int]:
    """Collects the tests, and runs none. Returns their number, and the exit code."""
    with tempfile.TemporaryDirectory() as directory:
        journal = Path(directory) / "journal"
        code = _run_pytest(part, ["--collect-only", "-qq", *arguments], Settings(str(journal), time.time() + 300))
        num_tests = sum(len(event.get("collected", ())) for event in read_journal(journal))
        return num_tests, INTERRUPTED if code is None else code


def _run_pytest(part: Part, arguments: Sequence[str], settings: Settings) -> int | None:
    """Returns its exit code, or None if we are interrupted. It and what it started die with the deadline."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # The journal sets faulthandler's only timer; pytest would set it again.
    command += ["-o", "faulthandler_timeout=0"]
    command += ["-p", "tests.gpu.journal", "-rs", *(str(file.path) for file in part), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings.as_environment(), start_new_session=True)
    try:
        return process.wait(timeout=max(1.0, settings.deadline - time.time() + _EXTRA_S))
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    except KeyboardInterrupt:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the servers of a test whose process has ended
        process.wait()


def _result(events: Sequence[dict[str, Any]], code: int | None) -> PartResult:
    """code: of the last process; None if we are interrupted."""
    collected = dict.fromkeys(test for event in events for test in event.get("collected", ()))
    begun = [event["begun"] for event in events if "begun" in event]
    finished = {event["finished"] for event in events if "finished" in event}
    result = PartResult(not_run=[test for test in collected if test not in set(begun)])
    for event in events:
        if "outcome" in event and result.outcomes.get(event["test"]) != "failed":
            result.outcomes[event["test"]] = event["outcome"]
    result.outcomes |= {test: "killed" for test in begun if test not in finished}
    was_stopped = any("out_of_time" in event for event in events)  # which pytest calls interrupted
    if code is None:
        result.exit_code = INTERRUPTED
    elif code in _PYTEST_FAILED:
        result.exit_code = code
    elif (code not in (0, NO_TESTS) and not was_stopped) or {"failed", "killed"} & set(result.outcomes.values()):
        result.exit_code = FAILED
    elif result.not_run:
        result.exit_code = NOT_ALL_RUN
    elif code == NO_TESTS and not result.outcomes:
        result.exit_code = NO_TESTS
    return result
