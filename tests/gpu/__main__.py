"""The tests that need a CUDA device, in parts: `python -m tests.gpu --help`."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from tests.gpu.part_runner import FAILED, INTERRUPTED, NO_TESTS, NOT_ALL_RUN, PartResult, collect_part, run_part
from tests.gpu.parts import PART_MINUTES, PARTS

HELP = f"""usage: python -m tests.gpu [PART…] [--list | --dry-run] [--minutes M] [--journal DIRECTORY]
       [pytest arguments]

Run the tests that need a CUDA device; without one, one line says so, and the exit code is 0. Without PART, all parts
run. What follows the parts goes to pytest: python -m tests.gpu kernels -k graphs -x

  PART         {", ".join(PARTS)}; see --list
  --list       what each part has
  --dry-run    only import and collect the tests: works without a device, and fails if a file cannot be imported
  --minutes M  limit of each part (default: {PART_MINUTES:g}); tests that no time is left for are named as not run
  --journal DIRECTORY  what happens to each test, with the reason of a failure, is a line of JSON there at once, in
               PART.jsonl
  --help       this text

Each test has a limit of its own (pytest's --timeout=SECONDS sets another). A test that hangs or kills its process
counts as killed, and the others run in a new process.

exit code: 0 all passed or skipped, {FAILED} something failed or was killed, {INTERRUPTED} interrupted, {NO_TESTS} no
test, {NOT_ALL_RUN} nothing failed, but not all was run
"""


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    words = list(argv)
    if "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0
    if "--list" in words:
        show_parts()
        return 0
    is_dry_run, minutes, journal = "--dry-run" in words, PART_MINUTES, None
    if is_dry_run:
        words.remove("--dry-run")
    names, rest = [], words
    while rest and (rest[0] in PARTS or rest[0].partition("=")[0] in ("--minutes", "--journal")):
        word, rest = rest[0], rest[1:]
        if word in PARTS:
            names.append(word)
            continue
        name, has_value, value = word.partition("=")
        if not has_value and rest:
            value, rest = rest[0], rest[1:]
        if name == "--journal":
            journal = Path(value)
            continue
        try:
            minutes = float(value)
        except ValueError:
            minutes = 0.0
        if not minutes > 0:
            return _usage_error(f"--minutes: a number of minutes, not {value!r}")
    if rest and not rest[0].startswith("-"):
        return _usage_error(f"{rest[0]!r} is not a part; the parts are {', '.join(PARTS)}")
    names = names or list(PARTS)
    return dry_run(names, rest) if is_dry_run else run(names, rest, minutes, journal)


def _usage_error(why: str) -> int:
    print(f"python -m tests.gpu: {why}", file=sys.stderr)
    return 4


def show_parts() -> None:
    for name, part in PARTS.items():
        print(name)
        for file in part:
            print(f"  {file.path.stem.removeprefix('test_').removesuffix('_on_cuda'):18} {file.what}")


def dry_run(names: Sequence[str], arguments: Sequence[str]) -> int:
    codes = []
    for name in names:
        num_tests, code = collect_part(PARTS[name], arguments)
        print(f"{name}: {num_tests} tests" + (f", pytest's exit code {code}" if code else ""), flush=True)
        codes.append(code)
    return max(codes)


def run(names: Sequence[str], arguments: Sequence[str], minutes: float, journal: Path | None) -> int:
    import torch

    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    if find_spec("pytest_timeout") is None:
        print("pytest-timeout is not installed: a test that hangs is ended with its process", flush=True)
    signal.signal(signal.SIGTERM, _interrupt)
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    results: dict[str, PartResult] = {}
    lines: list[str] = []
    for name in names:
        print(f"part {name}", flush=True)
        started_s = time.monotonic()
        results[name] = run_part(PARTS[name], arguments, 60 * minutes, kept=journal and journal / f"{name}.jsonl")
        lines.append(results[name].line(name, time.monotonic() - started_s))
        if results[name].exit_code in (INTERRUPTED, 3, 4):
            break
    show_results(results, lines)
    return worst_code([result.exit_code for result in results.values()])


def show_results(results: dict[str, PartResult], lines: Sequence[str]) -> None:
    for result in results.values():
        bad = {test: outcome for test, outcome in result.outcomes.items() if outcome in ("failed", "killed")}
        for test, outcome in (bad | dict.fromkeys(result.not_run, "not run")).items():
            print(f"{outcome}: {test}")
    print(*lines, sep="\n", flush=True)


def worst_code(codes: Sequence[int]) -> int:
    """A part without a test does not count beside one with tests."""
    for code in (INTERRUPTED, 3, 4, FAILED, NOT_ALL_RUN):
        if code in codes:
            return code
    return min(codes)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left takes a second
    raise KeyboardInterrupt


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
