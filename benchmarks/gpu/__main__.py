"""Measures this server on a GPU, without any model to fetch: `python -m benchmarks.gpu --help`."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.parts import Measured, Sizes, run_part
from benchmarks.random_models import LLAMA_1B, LLAMA_8B, TINY, ModelShape, num_bytes, write_config, write_model
from benchmarks.results import make_console
from benchmarks.server.own_server import own_server
from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.results import machine_facts

MAX_MINUTES = 8.0
MIN_SECONDS = 20.0
"""A server or a part is not begun with less time left."""
SIZES = Sizes(32, 32, 128, 512, 220, (1, 16, 64, 256, 1024), 64, (32, 256, 1024), (1, 64, 1024))
TINY_SIZES = Sizes(2, 3, 4, 4, 12, (1, 4), 8, (3, 6), (1, 4))
_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One server, and what is measured on it."""

    shape: ModelShape
    parts: tuple[str, ...]
    flags: tuple[str, ...] = ()


ATTENTION_RUNS = (
    ServerRun(LLAMA_8B, ("attention",)),
    ServerRun(LLAMA_8B, ("attention",), ("attention_backend=torch",)),
)
ATTENTION_SECONDS = 150.0
"""Time for attention alone; compiling FlashInfer's kernels takes most of it."""
ATTENTION = "attention"
CHECK = "check"
CHECK_RUNS = (ServerRun(LLAMA_1B, (CHECK,)), ServerRun(LLAMA_8B, (CHECK,)))
PROFILE = "profile"
MODEL_PARTS: dict[str, tuple[ServerRun, ...]] = {
    PROFILE: (
        ServerRun(LLAMA_1B, (PROFILE,)),
        ServerRun(LLAMA_1B, (PROFILE,), ("torch_compile=T",)),
    ),
    "steps": (
        ServerRun(LLAMA_1B, ("steps",)),
        ServerRun(LLAMA_1B, ("steps",), ("torch_compile=T",)),
        ServerRun(LLAMA_1B, ("steps",), ("attention_backend=torch",)),  # beside FlashInfer, where that is installed
    ),
    "workloads": (
        ServerRun(LLAMA_1B, ("groups", "sharegpt", "top_p")),
        ServerRun(LLAMA_1B, ("groups", "sharegpt"), ("use_hydragen=F",)),
    ),
    "8b": (ServerRun(LLAMA_8B, ("steps", "monkeys", "sharegpt")),),
}
PART_NAMES = (CHECK, ATTENTION, *MODEL_PARTS)
INTERRUPTED = 2
"""Exit code after SIGINT or SIGTERM."""


_SLOW_ON_CPU = ("torch_compile=T",)
"""Compiling takes long there."""


def tiny(runs: Sequence[ServerRun]) -> tuple[ServerRun, ...]:
    """The runs with a tiny model on a CPU, without those that would be the same there."""
    flags = [tuple(flag for flag in run.flags if flag not in _SLOW_ON_CPU) for run in runs]
    same = [replace(run, shape=TINY, flags=own) for run, own in zip(runs, flags, strict=True)]
    return tuple(dict.fromkeys(same))


@dataclass(slots=True)
class Results:
    """What has been measured so far. Every change is written to the file at once."""

    path: Path
    facts: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def log_path(self) -> Path:
        """What the measured processes write to standard error."""
        return self.path.with_suffix(".log")

    def add(self, run: ServerRun, part: str, status: str, seconds: float, **values: Any) -> None:
        """status: "measured", "failed" or "not run"; the last two have a `reason`."""
        self._end(self._begin(run, part), status, seconds, values)

    @contextmanager
    def measuring(self, run: ServerRun, part: str) -> Iterator[Measured]:
        """Keep what the body adds, with the status "running" until its end, also if it fails or this process is
        killed. A ServerError ends the part alone."""
        entry, began_s = self._begin(run, part), time.monotonic()
        try:
            yield Measured(entry, self.write)
        except ServerError as error:
            self._end(entry, "failed", time.monotonic() - began_s, {"reason": str(error)})
        except KeyboardInterrupt:
            self._end(entry, "failed", time.monotonic() - began_s, {"reason": "interrupted"})
            raise
        else:
            self._end(entry, "measured", time.monotonic() - began_s, {})

    def _begin(self, run: ServerRun, part: str) -> dict[str, Any]:
        entry = {"model": run.shape.name, "flags": run.flags, "part": part, "status": "running"}
        self.parts.append(entry)
        self.write()
        return entry

    def _end(self, entry: dict[str, Any], status: str, seconds: float, values: dict[str, Any]) -> None:
        entry |= {"status": status, "seconds": seconds} | values
        self.write()
        why = f": {entry['reason']}" if "reason" in entry else ""
        name = f"{entry['model']} {' '.join(entry['flags'])} {entry['part']}"
        print(f"{name}: {status}, {seconds:.1f} s{why}", flush=True)

    def write(self) -> None:
        """Replace the file as a whole, so that a killed run leaves what it has measured."""
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps({**self.facts, "parts": self.parts}, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def gpu_facts() -> dict[str, Any]:
    """What nvidia-smi says of each GPU, and versions of packages; without a GPU, the list is empty."""
    gpus: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        gpus = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {"gpus": gpus, "packages": packages}


def measure(runs: Sequence[ServerRun], flags: Sequence[str], sizes: Sizes, results: Results, deadline_s: float) -> None:
    """Every part of every run; a model's checkpoint is written once. deadline_s: by time.monotonic()."""
    with tempfile.TemporaryDirectory() as root:
        for run in runs:
            directory = Path(root) / run.shape.name.replace(" ", "-")
            pending = list(run.parts)
            started_s = time.monotonic()
            try:
                _require_time(deadline_s)
                if not directory.exists():
                    _write(directory, run.shape)
                begin = _measure_profile if PROFILE in run.parts else _measure_server
                begin(run, directory, flags, sizes, results, deadline_s, pending)
            except (ServerError, OSError) as error:
                for part in pending:
                    results.add(run, part, "not run", time.monotonic() - started_s, reason=str(error))
            except KeyboardInterrupt:
                for part in pending:
                    results.add(run, part, "not run", time.monotonic() - started_s, reason="interrupted")
                raise


def measure_checks(runs: Sequence[ServerRun], flags: Sequence[str], results: Results, deadline_s: float) -> None:
    """`toka check` for random weights of each shape: what computes wrongly or not at all is a failure."""
    for run in runs:
        with tempfile.TemporaryDirectory() as directory, results.measuring(run, CHECK) as measured:
            write_config(Path(directory), run.shape)
            command = [sys.executable, "-m", "tokasaurus", "check", f"model={directory}", *flags, "--json"]
            measured.add(check={"results": []})
            _measure_check(command, deadline_s - time.monotonic(), measured, results.log_path)


def _measure_check(command: Sequence[str], timeout_s: float, measured: Measured, log: Path) -> None:
    """Raises ServerError, which names what is wrong."""
    found = measured.values["check"]
    late = ""
    try:
        for row in _rows_of(command, timeout_s, log):
            if "feature" in row:
                found["results"].append(row)
            else:
                found |= row
            measured.keep()
    except TooLate as error:
        late = str(error)
    except ServerError:
        if all(row["failure"] is None for row in found["results"]):
            raise
    wrong = [f"{row['feature']}: {row['failure']}" for row in found["results"] if row["failure"] is not None]
    if reason := "; ".join(filter(None, (*wrong, late))):
        raise ServerError(reason)


def measure_attention(arguments: Sequence[str], results: Results, deadline_s: float) -> None:
    """Attention without a server, in processes of their own, whose memory is free afterwards."""
    for run in ATTENTION_RUNS:
        backend = [f"--backend={flag.partition('=')[2]}" for flag in run.flags]
        command = [sys.executable, "-m", "benchmarks.gpu.attention", *arguments, *backend]
        with results.measuring(run, ATTENTION) as measured:
            measured.add(attention={})
            for row in _rows_of(command, min(ATTENTION_SECONDS, deadline_s - time.monotonic()), results.log_path):
                measured.values["attention"] |= row
                measured.keep()


def _measure_server(
    run: ServerRun,
    directory: Path,
    flags: Sequence[str],
    sizes: Sizes,
    results: Results,
    deadline_s: float,
    pending: list[str],
) -> None:
    """Measures and removes the parts of `pending`. Raises ServerError if the server does not start, or time is up."""
    started_s = time.monotonic()
    own_flags = [f"model={directory}", "log_level=debug", *flags, *run.flags]
    with (
        results.log_path.open("a") as log,
        own_server(own_flags, max(1.0, deadline_s - started_s), log) as server,
    ):
        memory = [line for line in server.start_lines if " planned, " in line]
        lines = {"lines": server.start_lines, "memory": memory}
        results.add(run, "start", "measured", time.monotonic() - started_s, **lines)
        while pending:
            _require_time(deadline_s)
            part = pending.pop(0)
            with results.measuring(run, part) as measured:
                run_part(part, server.base_url, sizes, directory, deadline_s - time.monotonic(), measured)


def _measure_profile(
    run: ServerRun,
    directory: Path,
    flags: Sequence[str],
    sizes: Sizes,
    results: Results,
    deadline_s: float,
    pending: list[str],
) -> None:
    """Decode steps of a worker without a server, in a process of its own. Its traces lie beside the results."""
    pending.clear()
    names = (flag.replace("=", "-") for flag in run.flags)
    traces = results.path.with_name("-".join((results.path.stem, "traces", *names)))
    rows = [str(num_rows) for num_rows in sizes.profile_rows]
    command = [sys.executable, "-m", "benchmarks.gpu.profile_steps", str(directory), "--rows", *rows]
    command += ["--traces", str(traces), "log_level=debug", *flags, *run.flags]
    with results.measuring(run, PROFILE) as measured:
        measured.add(profile=[], traces=traces.name)
        for row in _rows_of(command, deadline_s - time.monotonic(), results.log_path):
            measured.add_row("profile", row)


class TooLate(ServerError):
    """A process has not ended in its time."""


def _rows_of(command: Sequence[str], timeout_s: float, log: Path) -> Iterator[dict[str, Any]]:
    """Each line of JSON that the command prints, when it prints it. Raises ServerError with its last line in the log,
    or TooLate."""
    with log.open("ab") as errors:
        begin = errors.tell()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            too_late = threading.Timer(max(1.0, timeout_s), process.kill)
            too_late.start()
            try:
                for line in process.stdout:
                    if line.startswith("{") and line.endswith("}\n"):
                        yield json.loads(line)
                code = process.wait()
                if not too_late.is_alive():
                    raise TooLate(f"it was not finished after {timeout_s:.0f} s")
            finally:
                too_late.cancel()
                process.kill()
    if code:
        raise ServerError(_last_line(log.read_bytes()[begin:].decode(errors="replace"), code))


def _last_line(errors: str, code: int) -> str:
    """Of what a process has written to standard error."""
    return [f"exit code {code}", *filter(None, errors.splitlines())][-1]


def _require_time(deadline_s: float) -> None:
    if deadline_s - time.monotonic() < MIN_SECONDS:
        raise ServerError("no time is left")


def _write(directory: Path, shape: ModelShape) -> None:
    """Raises OSError, and leaves nothing then."""
    free, needed = shutil.disk_usage(directory.parent).free, num_bytes(shape)
    if free < needed:
        raise OSError(f"the weights need {needed / 1e9:.1f} GB, and {directory.parent} has {free / 1e9:.1f} GB")
    directory.mkdir()
    try:
        write_model(directory, shape)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def print_results(results: Results, console: Console) -> None:
    table = Table()
    for column in ("model", "flags", "part", "measured"):
        table.add_column(column)
    for part in results.parts:
        table.add_row(part["model"], " ".join(part["flags"]), part["part"], _shown(part))
    console.print(table)


def _shown(part: dict[str, Any]) -> str:
    """Of a part that failed, the reason and what it had measured."""
    lines = [] if part["status"] == "measured" else [f"{part['status']}: {part['reason']}"]
    if part.get("check"):
        rows = part["check"]["results"]
        lines.append(
            f"{sum(row['failure'] is None for row in rows)} of {len(rows)} comparisons are right,"
            f" {sum(row['seconds'] for row in rows):.1f} s beside loading and compiling"
        )
    if "prefix_share" in part.get("attention", ()):
        values = part["attention"]
        lines.append(
            f"{values['backend']}: decode reads {values['decode_bytes_per_s'] / 1e9:,.0f} GB/s,"
            f" {values['decode_share']:.2f} of a copy's; prefix {values['prefix_flop_per_s'] / 1e12:,.1f} TFLOP/s,"
            f" {values['prefix_share']:.2f} of a matrix product's"
        )
    for row in part.get("profile", ()):
        lines += [f"{row['num_rows']} rows: {row['reason']}"] if "reason" in row else _shown_profile(row)
    lines += [
        f"{row['num_rows']} rows: {row['step_ms']:.2f} ms, idle {row['idle_share']:.0%}"
        for row in part.get("steps", ())
    ]
    lines += [
        f"{row['num_rows']} rows: {row['summary']['output_tokens_per_s']:,.0f} output tokens/s"
        for row in part.get("groups", ())
    ]
    if "summary" in part:
        lines.append(f"{part['summary']['output_tokens_per_s']:,.0f} output tokens/s")
    lines += part.get("memory", ())
    return "\n".join(lines) or f"{part['seconds']:.1f} s"


def _shown_profile(row: dict[str, Any]) -> list[str]:
    num_launches = sum(row["launches_per_step"].values())
    first = (
        f"{row['num_rows']} rows: {row['step_ms']:.2f} ms, {row['host_ms']:.2f} of the host;"
        f" {row['kernels_per_step']:.0f} kernels ({row['kernels_per_layer']} a layer), {num_launches:.0f} launches;"
        f" {row['busy_ms']:.2f} ms busy, {row['idle_ms']:.2f} idle"
    )
    if (mixed := row.get("with_prompt")) is not None:
        first += (
            f"; beside a prompt of {mixed['num_tokens']} tokens {mixed['step_ms']:.2f} ms, {mixed['host_ms']:.2f} of"
            " the host"
        )
    longest = (
        f"  {kernel['share']:4.0%} {kernel['us']:,.0f} us in {kernel['per_step']:g}: {kernel['name'][:60]}"
        for kernel in row["longest_kernels"]
    )
    return [first, *longest]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measure this server with random weights in the shapes of Llama 3.2 1B and Llama 3.1 8B. Results"
        " are written after each measurement. The exit code is 1 if one failed or was not run, 2 after SIGINT or"
        " SIGTERM, which end the server and keep what was measured.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PART | NAME=VALUE",
        help=f"parts ({', '.join(PART_NAMES)}; none: all), and flags of the server",
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, for a look at the program")
    parser.add_argument(
        "--minutes", type=float, default=MAX_MINUTES, metavar="M", help="limit of each part (default: %(default)g)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-DATE.json, or dry-run-DATE.json"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    names = [word for word in args.words if "=" not in word]
    if unknown := [name for name in names if name not in PART_NAMES]:
        parser.error(f"{unknown[0]!r} is not a part; the parts are {', '.join(PART_NAMES)}")
    flags = [word for word in args.words if "=" in word]
    started_at = datetime.now(timezone.utc)
    name = "dry-run" if args.dry_run else "gpu"
    path = args.output or Path(__file__).parents[1] / "results" / f"{name}-{started_at:%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "started_at": started_at.isoformat(timespec="seconds"),
        "machine": machine_facts() | {"num_usable_cores": len(os.sched_getaffinity(0))},
        **gpu_facts(),
    }
    results = Results(path, facts)
    results.write()
    code = 0
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for part in names or PART_NAMES:
            _measure_part(part, args.dry_run, flags, results, time.monotonic() + 60 * args.minutes)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    print_results(results, make_console(140))
    print(f"results: {path}")
    return code or (0 if all(part["status"] == "measured" for part in results.parts) else 1)


def _measure_part(name: str, is_dry_run: bool, flags: Sequence[str], results: Results, deadline_s: float) -> None:
    if name == CHECK:
        device = "cpu" if is_dry_run else "cuda"
        runs = tiny(CHECK_RUNS) if is_dry_run else CHECK_RUNS
        measure_checks(runs, [f"device={device}", "log_level=debug", *flags], results, deadline_s)
    elif name == ATTENTION:
        arguments = ["--device=cpu", "--tiny"] if is_dry_run else ["--device=cuda"]
        measure_attention(arguments, results, deadline_s)
    elif is_dry_run:
        own_flags = ["device=cpu", "kv_cache_num_tokens=16384", *flags]
        measure(tiny(MODEL_PARTS[name]), own_flags, TINY_SIZES, results, deadline_s)
    else:
        measure(MODEL_PARTS[name], ["device=cuda", *flags], SIZES, results, deadline_s)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending the server takes some seconds
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
