"""Runs of several servers beside each other: medians, and ratios within the rounds in which they had the same load."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.measure import Run

COMPARED = {
    "output_tokens_per_s": "output tokens/s",
    "full_load": "… at full load",
    "requests_per_s": "requests/s",
    "goodput_per_s": "good requests/s",
    "cost_per_million_tokens": "cost of 1M output tokens",
    "ttft_s p50": "TTFT p50, ms",
    "ttft_s p99": "TTFT p99, ms",
    "tpot_s p50": "TPOT p50, ms",
    "tpot_s p99": "TPOT p99, ms",
    "itl_s p50": "ITL p50, ms",
    "itl_s p99": "ITL p99, ms",
    "e2el_s p50": "end to end p50, ms",
    "e2el_s p99": "end to end p99, ms",
    "server kv_peak": "KV cache, most in use, %",
    "server cached_share": "prompt tokens cached, %",
    "server idle_share": "device idle, %",
    "server preemptions": "preemptions",
}
"""Figure: its heading. Those with two words are percentiles of a time, or of the server's own metrics."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, as far as it is compared."""

    name: str
    seed: int
    load: str
    """Runs with the same seed and load had the same requests."""
    summary: dict[str, Any]
    """Figures of the load, by their names in the JSON file."""
    server_figures: dict[str, float | None]
    """Figures of the server's metrics, by their names in the JSON file."""

    def figure(self, name: str) -> float | None:
        """None if the run does not have it."""
        field, _, percentile = name.partition(" ")
        if field == "server":
            own = self.server_figures[percentile]
            return own if own is None or percentile == "preemptions" else 100 * own
        value = self.summary[field]
        if value is not None and percentile:
            return 1000 * float(value["percentiles"][percentile])
        if value is not None and field == "full_load":
            value = value["output_tokens_per_s"]
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of one server."""

    median: float
    low: float
    high: float
    ratio: float | None
    """Median over the rounds of the ratio to the first server's with the same requests; of the medians if no round is
    common to both; None where the first server has no such figure, or 0."""
    ratio_low: float | None
    """This and the next are None without a common round."""
    ratio_high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    names: list[str]
    """The first is what the others are compared with."""
    num_runs: dict[str, int]
    rows: dict[str, dict[str, Row]]
    """Figure (of COMPARED), name -> row."""


class NotComparable(ValueError):
    """The message is one line for the user."""


def measured(run: Run) -> Measured:
    return Measured(run.name, run.seed, load_of(run.config), asdict(run.summary), asdict(run.server_figures))


def compare(runs: Sequence[Run]) -> Comparison:
    """The first run's server is what the others are compared with. A figure that a server lacks has no row."""
    return compare_measured([measured(run) for run in runs])


def compare_measured(runs: Sequence[Measured]) -> Comparison:
    names = list(dict.fromkeys(run.name for run in runs))
    rows: dict[str, dict[str, Row]] = {}
    for figure in COMPARED:
        of_name = {
            name: {
                (run.seed, run.load): value
                for run in runs
                if run.name == name and (value := run.figure(figure)) is not None
            }
            for name in names
        }
        base = of_name[names[0]]
        for name, values in of_name.items():
            if values:
                rows.setdefault(figure, {})[name] = _row(values, base)
    return Comparison(names, {name: sum(run.name == name for run in runs) for name in names}, rows)


def _row(values: dict[tuple[int, str], float], base: dict[tuple[int, str], float]) -> Row:
    """values, base: by seed and load."""
    median = statistics.median(values.values())
    ratios = [value / base[key] for key, value in values.items() if base.get(key)]
    ratio: tuple[float | None, float | None, float | None] = (None, None, None)
    if ratios:
        ratio = (statistics.median(ratios), min(ratios), max(ratios))
    elif base and statistics.median(base.values()):
        ratio = (median / statistics.median(base.values()), None, None)
    return Row(median, min(values.values()), max(values.values()), *ratio)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A line per figure: medians and ranges, with the ratio to the first server and its range over the rounds."""
    first, *others = comparison.names
    table = Table("median (range)")
    table.add_column(f"{first}, {comparison.num_runs[first]} runs", justify="right")
    for name in others:
        table.add_column(f"{name}, {comparison.num_runs[name]} runs", justify="right")
        table.add_column(f"over {first}", justify="right")
    for figure, rows in comparison.rows.items():
        cells = [shown(rows.get(first))]
        for name in others:
            cells += [shown(rows.get(name)), shown_ratio(rows.get(name))]
        table.add_row(COMPARED[figure], *cells)
    console.print(table)


def shown(row: Row | None) -> str:
    """The median with its range, if there are several runs."""
    if row is None:
        return "–"
    spread = "" if row.low == row.high else f" ({row.low:,.1f}–{row.high:,.1f})"
    return f"{row.median:,.1f}{spread}"


def shown_ratio(row: Row | None) -> str:
    """The row's ratio for the table, with its range over the rounds if there are several; – without a ratio."""
    if row is None or row.ratio is None:
        return "–"
    spread = "" if row.ratio_low == row.ratio_high else f" ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    return f"{row.ratio:.2f}{spread}"


def load_of(config: dict[str, Any]) -> str:
    """The flags that decide what is asked and when, but for the seed."""
    names = [
        name
        for name, flag in BenchConfig.flags.items()
        if flag.heading in ("workload", "load") and name not in ("rounds", "seed", "timeout")
    ]
    return " ".join(f"{name}={config.get(name)}" for name in names)


def of_json(run: dict[str, Any]) -> Measured:
    return Measured(run["name"], run["seed"], load_of(run["config"]), run["summary"], run["server_figures"])


def read_runs(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs of files that `toka bench` wrote, whole. Raises NotComparable.

    Where several files have a server of the same name, its runs have the file's name in front."""
    of_file: dict[Path, list[dict[str, Any]]] = {}
    for file in files:
        try:
            of_file[file] = json.loads(file.read_text(encoding="utf-8"))["runs"]
            for run in of_file[file]:
                for figure in COMPARED:
                    of_json(run).figure(figure)
                _ = run["workload"], run["requests"], run["server"]["model"], run["machine"]["cpu_model"]
        except OSError as error:
            raise NotComparable(f"{file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotComparable(f"{file} is no result of toka bench: {error!r}") from None
        if not of_file[file]:
            raise NotComparable(f"{file} has no runs")
    names = {file: {run["name"] for run in runs} for file, runs in of_file.items()}
    stems = [file.stem for file in of_file]
    for file, runs in of_file.items():
        others = set[str]().union(*(names[other] for other in of_file if other != file))
        if names[file] & others:
            label = file.stem if stems.count(file.stem) == 1 else str(file)
            for run in runs:
                run["name"] = f"{label}: {run['name']}"
    found = [run for runs in of_file.values() for run in runs]
    workloads = {run["workload"] for run in found}
    if len(workloads) > 1:
        raise NotComparable(f"the files have different workloads: {', '.join(sorted(workloads))}")
    return found
