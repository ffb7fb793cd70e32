"""`make gpu-quarter`: what a machine with a GPU can tell in a quarter of an hour, in two calls; see docs/gpu.md.

Before the kit is installed such a machine may have no package but PyTorch: this module needs none. Each step is a
process of its own, which writes its rows and its log to files of the output directory by itself, so that whatever ends
this process or the machine costs no row that was printed.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.random_models import LLAMA_1B, LLAMA_8B, TINY, ModelShape, write_config, write_model
from tests.gpu.parts import PARTS

ROOT = Path(__file__).parents[2]
CALLS = ("first", "second")
SECONDS = {"first": 490.0, "second": 190.0}
"""Of each call, so that it ends by itself within 500 and 200."""
MIN_SECONDS = 20.0
"""No step begins with less time left."""
WRONG = "wrong.json"
"""Features that the checks of the first call found wrong, for the second."""
_GRACE_S = 10
"""A step that does not end at its limit by SIGTERM gets SIGKILL so much later."""
_WINDOWS_S = 60
"""For what FlashInfer compiles and computes with windows, caps and sinks."""
TESTS_OF = {
    "attention_backend=flashinfer": ("flashinfer",),
    "flashinfer_calls": ("flashinfer",),
    "flashinfer_fa3": ("flashinfer",),
    "triton_attention": ("triton_kernels",),
    "triton_sampling": ("triton_sample",),
    "triton_layers": ("triton_layers",),
    "triton_steps": ("triton_kernels", "graphs"),
    "triton_adapters": ("triton_low_rank",),
    "triton_experts": ("triton_experts",),
    "torch_compile": ("graphs",),
    "use_cudagraphs": ("graphs", "recorded_flashinfer"),
    "symmetric_all_reduce": ("nccl",),
}
"""By feature of `toka check`, the subjects of the files of tests that say more about it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A process whose standard output is rows of JSON, unless it writes results to files of its own."""

    name: str
    command: tuple[str, ...]
    """Arguments of this Python."""
    limit_s: float
    prints_rows: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the first call: its check, and a profile of its decode steps."""

    name: str
    shape: ModelShape
    check_s: float
    rows: tuple[int, ...]
    """Of each step of the profile."""
    profile_s: float


# With 30 s for the kit, the first check and the first profile end within four minutes.
MODELS = (
    Model("1b", LLAMA_1B, 110, (1, 64, 256, 1024), 100),
    Model("8b", LLAMA_8B, 120, (1, 64, 256), 110),
)
CONTEXT = 1000
"""Tokens of each row of a profile, as in the estimates."""
TINY_ROWS = (1, 4)
_ON_CPU = ("device=cpu", "kv_cache_num_tokens=16384")


class Ended(NamedTuple):
    """A step that was not begun has neither a code nor rows."""

    exit_code: int | None
    rows: list[dict[str, Any]]
    """What it has printed, as far as it came."""


class Journal:
    """CALL.jsonl with the rows of all steps, each step between two rows that name it, and CALL.log with what the
    processes write to standard error."""

    def __init__(self, call: str, output: Path, deadline_s: float) -> None:
        """Files of an earlier call of this name are renamed: a step that outlived it may be writing to them still.

        deadline_s: by time.monotonic()."""
        self.output, self.deadline_s = output, deadline_s
        self.rows_path, self.log_path = output / f"{call}.jsonl", output / f"{call}.log"
        for path in (self.rows_path, self.log_path):
            if path.exists():
                path.replace(path.with_name(f"{path.name}.before"))
            path.touch()
        self._began_s = time.monotonic()
        self.num_failed = 0

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def write(self, step: str, **values: Any) -> None:
        """One row, whole, also after a process that was killed within one."""
        values = {"step": step, "at_s": round(time.monotonic() - self._began_s, 1), **values}
        with self.rows_path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                is_cut = file.read(1) != b"\n"
                file.write(b"\n" * is_cut)
            file.write(json.dumps(values).encode() + b"\n")
        _show(f"{values['at_s']:6.1f} s  {step}: {_words(values)}")

    def run(self, step: Step) -> Ended:
        if self.left_s() < MIN_SECONDS:
            self.num_failed += 1
            self.write(step.name, reason="no time is left")
            return Ended(None, [])
        self.write(step.name, command=shlex.join(step.command))
        begin = self.rows_path.stat().st_size
        limit_s = min(step.limit_s, self.left_s() - _GRACE_S)
        # timeout ends what the process has started too, and does so even if this process is killed before.
        command = ["timeout", f"--kill-after={_GRACE_S}", f"{limit_s:.0f}", sys.executable, *step.command]
        with self.rows_path.open("ab") as rows, self.log_path.open("ab") as log:
            log.write(f"== {step.name}\n".encode())
            log.flush()
            process = subprocess.Popen(command, cwd=ROOT, stdout=rows if step.prints_rows else log, stderr=log)
            try:
                code = process.wait()
            finally:
                process.terminate()
        found = read_rows(self.rows_path, begin)
        for row in found:
            if line := describe(row):
                _show(f"          {line}")
        self.num_failed += code != 0
        self.write(step.name, exit_code=code)
        return Ended(code, found)


def read_rows(path: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The whole rows of the file from a position on."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


def describe(row: dict[str, Any]) -> str:
    """One line, or none for a row that is as it should be and has no figure of interest."""
    if "step_ms" in row:
        parts = {"": row, **{name: row[name] for name in ("with_groups", "with_prompt") if name in row}}
        return f"{row['num_rows']} rows: " + "; ".join(
            f"{name.replace('_', ' ')} {one['step_ms']:.2f} ms, {one['host_ms']:.2f} of the host,"
            f" {one['idle_ms']:.2f} idle, {one['kernels_per_step']:.0f} kernels".strip()
            for name, one in parts.items()
        )
    if row.get("failure") is not None:
        return f"{row['feature']} {row['name'] or ''}: {row['failure']}"
    return _words(row) if "switched_off" in row or "reason" in row or "device" in row else ""


def _words(row: dict[str, Any]) -> str:
    words = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("step", "at_s"))
    return " ".join(words.split())


def _show(line: str) -> None:
    print(line[:400], flush=True)


def install_kit(kit: Path, work: Path, journal: Journal, is_dry_run: bool) -> None:
    """Into this Python, or else into a folder that the steps find by PYTHONPATH."""
    script, site = kit / "install.py", work / "site"
    if not script.exists():
        journal.write("kit", reason=f"there is no {script}: the packages are those of this Python")
        return
    if site.exists():
        _use_site(site)
    arguments = (str(script), "--dry-run" if is_dry_run else "--no-compile")  # compiling everything takes half a minute
    ended = journal.run(Step("kit", arguments, 60, prints_rows=False))
    if ended.exit_code and not is_dry_run:  # such as a Python that its system manages
        journal.run(Step("kit-in-a-folder", (*arguments, "--target", str(site)), 60, prints_rows=False))
        _use_site(site)


def _use_site(site: Path) -> None:
    os.environ["PYTHONPATH"] = str(site)


def note_machine(journal: Journal) -> None:
    facts = {}
    for name, command in {
        "nvidia_smi": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
        "libraries": ["sh", "-c", "ldconfig -p | grep cuda"],
    }.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            facts[name] = (done.stdout + done.stderr).strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            facts[name] = str(error)
    journal.write("machine", **facts, python=sys.version, cores=os.cpu_count())


def start_writing(directory: Path, shape: ModelShape) -> SpawnProcess:
    """A process that writes the checkpoint."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)  # a call that was killed may be writing still
    process = multiprocessing.get_context("spawn").Process(target=write_model, args=(directory, shape), daemon=True)
    process.start()
    return process


def run_first(journal: Journal, work: Path, is_dry_run: bool, flags: Sequence[str]) -> None:
    wrong_path, traces = work / WRONG, work / "traces"
    wrong_path.unlink(missing_ok=True)
    shutil.rmtree(traces, ignore_errors=True)
    wrong: dict[str, None] = {}
    device = "device=cpu" if is_dry_run else "device=cuda"
    flags = ["log_level=debug", *flags]
    models = list(map(tiny, MODELS)) if is_dry_run else MODELS
    writers = [start_writing(work / model.name, model.shape) for model in models]
    for model, writer in zip(models, writers, strict=True):
        config, weights = work / f"config-{model.name}", work / model.name
        config.mkdir(exist_ok=True)
        write_config(config, model.shape)
        check = ("-m", "tokasaurus", "check", f"model={config}", device, "max_loras=2", *flags, "--json")
        ended = journal.run(Step(f"check-{model.name}", check, model.check_s))
        wrong |= dict.fromkeys(find_wrong(ended))
        wrong_path.write_text(json.dumps(list(wrong)))
        writer.join(max(1.0, journal.left_s()))
        journal.write(f"weights-{model.name}", exit_code=writer.exitcode)
        command = ["-m", "benchmarks.gpu.profile_steps", str(weights), "--rows", *map(str, model.rows)]
        command += [f"--context={CONTEXT}", "--traces", str(traces / model.name)]
        command += [*(_ON_CPU if is_dry_run else [device]), *flags]
        journal.run(Step(f"profile-{model.name}", tuple(command), model.profile_s))
        pack(traces, journal.output / "traces.tar")


def tiny(model: Model) -> Model:
    """For a CPU."""
    return replace(model, shape=TINY, rows=TINY_ROWS)


def find_wrong(check: Ended) -> list[str]:
    """Features that a check has found wrong or switched off; "start" if it did not come to its end, or was refused."""
    found = [row["feature"] for row in check.rows if row.get("failure") is not None]
    ends = [row["switched_off"] for row in check.rows if "switched_off" in row]
    found += ends[0] if ends else ["start"]
    return found or ["start"] * bool(check.exit_code)


def pack(folder: Path, archive: Path) -> None:
    """The archive is replaced as a whole. The traces are compressed already."""
    if not folder.exists():
        return
    new = archive.with_name(f"{archive.name}.new")
    with tarfile.open(new, "w") as tar:
        tar.add(folder, folder.name)
    new.replace(archive)


def run_second(journal: Journal, work: Path, is_dry_run: bool, flags: Sequence[str]) -> None:
    path = work / WRONG
    wrong = json.loads(path.read_text()) if path.exists() else []
    journal.write("found-by-the-first-call", wrong=wrong)
    if wrong:
        command = tests_of(wrong, journal.left_s(), journal.output / "tests")
        command += ["--dry-run"] if is_dry_run else []
        journal.run(Step("tests", tuple(command), journal.left_s(), prints_rows=False))
        return
    command = ["-m", "tests.gpu", "attention", f"--minutes={_WINDOWS_S / 60:.2f}"]
    command += [f"--journal={journal.output / 'tests'}", "-k", "windows_caps", *(["--dry-run"] if is_dry_run else [])]
    journal.run(Step("windows", tuple(command), _WINDOWS_S + _GRACE_S, prints_rows=False))
    minutes = (journal.left_s() - _GRACE_S) / 60
    command = ["-m", "benchmarks.gpu", "workloads", f"--minutes={minutes:.2f}"]
    command += [f"--output={journal.output / 'workloads.json'}", *flags]
    command += ["--dry-run"] if is_dry_run else []
    journal.run(Step("workloads", tuple(command), journal.left_s(), prints_rows=False))


def tests_of(features: Sequence[str], seconds: float, kept: Path) -> list[str]:
    """Arguments of Python: the tests of these features, and those of all kernels for what has no tests of its own.

    kept: directory of the journals."""
    subjects = dict.fromkeys(subject for feature in features for subject in TESTS_OF.get(feature, ("triton",)))
    parts = [
        name for name, part in PARTS.items() if any(subject in file.path.name for file in part for subject in subjects)
    ]
    minutes = f"--minutes={(seconds - 2 * _GRACE_S) / 60 / len(parts):.2f}"
    return ["-m", "tests.gpu", *parts, minutes, f"--journal={kept}", "-k", " or ".join(subjects)]


def main(argv: Sequence[str]) -> int:
    """The exit code: 1 if a step failed or was not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.quarter", description="See docs/gpu.md.")
    parser.add_argument("words", nargs="*", metavar="first | second | NAME=VALUE", help="default: first; and flags")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-quarter", metavar="DIRECTORY"
    )
    parser.add_argument("--work", type=Path, metavar="DIRECTORY", help="weights, and what the second call must know")
    parser.add_argument("--kit", type=Path, default=ROOT / "gpu-kit", metavar="DIRECTORY", help="made by make gpu-kit")
    parser.add_argument("--seconds", type=float, help="of the call (default: 490 for the first, 190 for the second)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU; nothing is installed")
    args = parser.parse_intermixed_args(argv)
    calls = [word for word in args.words if "=" not in word] or ["first"]
    if len(calls) > 1 or calls[0] not in CALLS:
        parser.error(f"one call of {', '.join(CALLS)}, not {' '.join(calls)}")
    [call] = calls
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work: Path = args.work or Path(tempfile.gettempdir()) / "toka-gpu-quarter"
    for directory in (work, args.output):
        directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(call, args.output, time.monotonic() + (args.seconds or SECONDS[call]))
    note_machine(journal)
    install_kit(args.kit, work, journal, args.dry_run)
    flags = [word for word in args.words if "=" in word]
    run: Callable[..., None] = run_first if call == "first" else run_second
    run(journal, work, args.dry_run, flags)
    journal.write("end", num_failed=journal.num_failed)
    return 1 if journal.num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
