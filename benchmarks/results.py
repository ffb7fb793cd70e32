"""What the benchmarks share: facts of the machine, limits, progress bars, and results as JSON."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokasaurus.commands.bench.results import utc_now, write_json


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


def config_of(args: argparse.Namespace) -> dict[str, object]:
    """The arguments of a command, as they are written to a JSON file: without the API key."""
    values = {key: value for key, value in vars(args).items() if key != "api_key"}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def make_console(width: int) -> Console:
    """Standard output; `width` columns where it is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)
