"""Measures this server on a GPU, without any model to fetch: `python -m benchmarks.gpu --help`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.client import ServerError
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY, ModelShape, num_bytes, write_model
from benchmarks.gpu.parts import Sizes, run_part
from benchmarks.own_server import own_server
from benchmarks.report import machine_facts

MAX_MINUTES = 9.0
LEAST_SECONDS = 20.0
"""A server or a part is not begun with less time left."""
SIZES = Sizes(32, 32, 128, 512, 220, (1, 16, 64, 256, 1024), 64)
TINY_SIZES = Sizes(2, 3, 4, 4, 12, (1, 4), 8)
_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One server, and what is measured on it."""

    shape: ModelShape
    parts: tuple[str, ...]
    flags: tuple[str, ...] = ()


RUNS = (
    ServerRun(LLAMA_1B, ("steps", "monkeys", "sharegpt")),
    ServerRun(LLAMA_8B, ("steps", "monkeys", "sharegpt")),
    ServerRun(LLAMA_1B, ("monkeys",), ("use_hydragen=F",)),
    ServerRun(LLAMA_1B, ("steps",), ("attention_backend=torch",)),  # beside FlashInfer, where that is installed
)
ATTENTION_RUNS = (
    ServerRun(LLAMA_8B, ("attention",)),
    ServerRun(LLAMA_8B, ("attention",), ("attention_backend=torch",)),
)
ATTENTION_SECONDS = 150.0
"""Time for attention alone; compiling FlashInfer's kernels takes most of it."""
TINY_RUNS = (ServerRun(TINY, ("steps", "monkeys", "sharegpt")), ServerRun(TINY, ("monkeys",), ("use_hydragen=F",)))


@dataclass(slots=True)
class Results:
    """What has been measured so far. Every change is written to the file at once."""

    path: Path
    facts: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, run: ServerRun, part: str, status: str, seconds: float, **values: Any) -> None:
        """status: "measured", "failed" or "not run"; the last two have a `reason`."""
        entry = {"model": run.shape.name, "flags": run.flags, "part": part, "status": status, "seconds": seconds}
        self.parts.append(entry | values)
        self.write()
        why = f": {values['reason']}" if "reason" in values else ""
        print(f"{run.shape.name} {' '.join(run.flags)} {part}: {status}, {seconds:.1f} s{why}", flush=True)

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
                _measure_server(run, directory, flags, sizes, results, deadline_s, pending)
            except (ServerError, OSError) as error:
                for part in pending:
                    results.add(run, part, "not run", time.monotonic() - started_s, reason=str(error))


def measure_attention(arguments: Sequence[str], results: Results, deadline_s: float) -> None:
    """Attention without a server, in processes of their own, whose memory is free afterwards."""
    for run in ATTENTION_RUNS:
        started_s = time.monotonic()
        backend = [f"--backend={flag.partition('=')[2]}" for flag in run.flags]
        command = [sys.executable, "-m", "benchmarks.gpu.attention", *arguments, *backend]
        timeout_s = min(ATTENTION_SECONDS, max(1.0, deadline_s - started_s))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s)
            values = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            results.add(run, "attention", "failed", timeout_s, reason=f"it was not finished after {timeout_s:.0f} s")
        except subprocess.CalledProcessError as error:
            last_line = [*error.stderr.splitlines(), f"exit code {error.returncode}"][-1]
            results.add(run, "attention", "failed", time.monotonic() - started_s, reason=last_line)
        else:
            results.add(run, "attention", "measured", time.monotonic() - started_s, attention=values)


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
    own_flags = [f"model={directory}", *flags, *run.flags]
    with own_server(own_flags, max(1.0, deadline_s - started_s)) as server:
        results.add(run, "start", "measured", time.monotonic() - started_s, lines=server.start_lines)
        while pending:
            _require_time(deadline_s)
            part = pending.pop(0)
            began_s = time.monotonic()
            try:
                values = run_part(part, server.base_url, sizes, directory, deadline_s - began_s)
            except ServerError as error:
                results.add(run, part, "failed", time.monotonic() - began_s, reason=str(error))
            else:
                results.add(run, part, "measured", time.monotonic() - began_s, **values)


def _require_time(deadline_s: float) -> None:
    if deadline_s - time.monotonic() < LEAST_SECONDS:
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
    if part["status"] != "measured":
        return f"{part['status']}: {part['reason']}"
    if "attention" in part:
        values = part["attention"]
        return (
            f"{values['backend']}: decode reads {values['decode_bytes_per_s'] / 1e9:,.0f} GB/s,"
            f" {values['decode_share']:.2f} of a copy's; prefix {values['prefix_flop_per_s'] / 1e12:,.1f} TFLOP/s,"
            f" {values['prefix_share']:.2f} of a matrix product's"
        )
    if "steps" in part:
        return "\n".join(
            f"{row['num_rows']} rows: {row['step_ms']:.2f} ms, idle {row['idle_share']:.0%}" for row in part["steps"]
        )
    if "summary" in part:
        return f"{part['summary']['output_tokens_per_s']:,.0f} output tokens/s"
    return f"{part['seconds']:.1f} s"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measure this server with random weights in the shapes of Llama 3.2 1B and Llama 3.1 8B. Results"
        " are written after each part. The exit code is 1 if a part failed or was not run.",
    )
    parser.add_argument("flags", nargs="*", metavar="NAME=VALUE", help="flags of the server")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, for a look at the program")
    parser.add_argument(
        "--minutes", type=float, default=MAX_MINUTES, metavar="M", help="parts end by then (default: %(default)g)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-DATE.json, or dry-run-DATE.json"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    deadline_s = time.monotonic()
    args = make_parser().parse_intermixed_args(argv)
    deadline_s += 60 * args.minutes
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
    if args.dry_run:
        flags = ["device=cpu", "kv_cache_num_tokens=16384", *args.flags]
        measure_attention(["--device=cpu", "--tiny"], results, deadline_s)
        measure(TINY_RUNS, flags, TINY_SIZES, results, deadline_s)
    else:
        measure_attention(["--device=cuda"], results, deadline_s)
        measure(RUNS, ["device=cuda", *args.flags], SIZES, results, deadline_s)
    print_results(results, Console(width=None if sys.stdout.isatty() else 140))
    print(f"results: {path}")
    return 0 if all(part["status"] == "measured" for part in results.parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
