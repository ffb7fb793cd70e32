"""What the benchmarks share: facts of the machine, limits, progress bars, and results as JSON."""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokasaurus import __version__


@dataclass(frozen=True, slots=True)
class Check:
    """A measured figure and its limit."""

    name: str
    value: float
    limit: float
    is_met: bool


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name, value, limit, value >= limit)


def at_most(name: str, value: float, limit: float) -> Check:
    return Check(name, value, limit, value <= limit)


def print_checks(checks: Sequence[Check], console: Console) -> None:
    console.print("\nLimits")
    table = Table("")
    for column in ("measured", "limit", ""):
        table.add_column(column, justify="right")
    for check in checks:
        verdict = "met" if check.is_met else "[red]not met[/red]"
        table.add_row(check.name, f"{check.value:,.3f}", f"{check.limit:,g}", verdict)
    console.print(table)


def machine_facts(*packages: str) -> dict[str, object]:
    """Facts of this machine, and the versions of this project and of `packages`."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu_model": models[0].partition(":")[2].strip() if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "tokasaurus": __version__,
        **{name: version(name) for name in packages},
    }


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """--json and --check, for `end_results`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")


def begin_results(args: argparse.Namespace, machine: Mapping[str, object], console: Console) -> dict[str, Any]:
    """Prints the machine's facts -> the beginning of the results."""
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), soft_wrap=True)
    return {"config": config_of(args), "started_at": utc_now(), "machine": machine}


def end_results(results: dict[str, Any], checks: Sequence[Check], args: argparse.Namespace, console: Console) -> int:
    """Prints the limits and writes the results -> exit code: 1 if --check was given and a limit was missed, else 0."""
    if checks:
        print_checks(checks, console)
    if args.json is not None:
        write_json(args.json, results | {"checks": checks})
    return 1 if args.check and not all(check.is_met for check in checks) else 0


def utc_now() -> str:
    """UTC time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def config_of(args: argparse.Namespace) -> dict[str, object]:
    """The arguments of a command, as they are written to a JSON file: without the API key."""
    values = {key: value for key, value in vars(args).items() if key != "api_key"}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def write_json(path: Path, results: object) -> None:
    """results: of dataclasses, mappings, sequences and plain values."""
    path.write_text(json.dumps(results, indent=1, default=dataclasses.asdict) + "\n", encoding="utf-8")


def make_console(width: int) -> Console:
    """Standard output; `width` columns where it is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def print_error(error: object) -> None:
    """One line in red on standard error."""
    Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(description: str, total: float = 1.0, *columns: ProgressColumn) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar on the terminal while the block runs. Yields a function of what is done, up to `total`.

    columns: shown between the bar and the time."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=2,
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def counting_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """As `progress_bar`, with numbers. Yields a function to call when one more is done."""
    done = itertools.count(1)
    with progress_bar(description, total, MofNCompleteColumn()) as show:
        yield lambda: show(next(done))
