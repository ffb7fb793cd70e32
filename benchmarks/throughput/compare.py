"""Compares servers under the same load: `python -m benchmarks.throughput.compare --help`."""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import print_error
from benchmarks.throughput import measure as throughput
from benchmarks.throughput.client import ServerError
from benchmarks.throughput.report import Summary, print_failures

COMPARED = {  # field of Summary: its heading
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "latency_p50_s": "latency p50, s",
    "latency_p99_s": "latency p99, s",
}


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput.compare",
        description="Measure running servers alternately, or read earlier results, and print medians and their ratio to"
        " the first name.",
    )
    parser.add_argument(
        "--server",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a running server, with flags for it alone: 'llama.cpp=http://127.0.0.1:8080/v1 --usage-per-choice'",
    )
    parser.add_argument(
        "--result",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a file that throughput --output wrote",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="runs of each server (default: 3)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first round; each next round adds 1 (default: 0)"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write each run's JSON to DIR/NAME-SEED.json")
    parser.add_argument(
        "workload", nargs=argparse.REMAINDER, help="arguments of throughput, such as: monkeys --samples 64"
    )
    return parser


def round_orders(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """Order of the servers in each round, reversed in every second one: a machine that slows down then favours none."""
    return [list(names) if number % 2 == 0 else list(reversed(names)) for number in range(num_rounds)]


def measure_alternately(
    servers: Mapping[str, str], workload: Sequence[str], num_rounds: int, first_seed: int, output_dir: Path | None
) -> dict[str, list[Summary]]:
    """Summaries of each server by its name, one per round. All servers get the same requests in a round.

    No two rounds share prompts, so that no round finds prefixes cached by an earlier one.
    servers: name -> URL, followed by flags for this server alone. Raises ServerError, also if a request failed."""
    summaries: dict[str, list[Summary]] = {name: [] for name in servers}
    for number, names in enumerate(round_orders(list(servers), num_rounds)):
        for name in names:
            url, *flags = shlex.split(servers[name])
            seed = first_seed + number
            args, requests = throughput.parse([*workload, "--base-url", url, "--seed", str(seed), *flags])
            report = asyncio.run(throughput.measure(args, requests))
            if output_dir is not None:
                report.write(output_dir / f"{name}-{seed}.json")
            stderr = Console(stderr=True)
            stderr.print(f"round {number + 1}, {name}: {report.summary.output_tokens_per_s:,.1f} output tokens/s")
            if report.summary.num_failed:
                print_failures(report.requests, stderr)
                raise ServerError(f"{report.summary.num_failed} requests to {name} failed: not comparable")
            summaries[name].append(report.summary)
    return summaries


def read_results(files: Sequence[tuple[str, str]]) -> dict[str, list[Summary]]:
    """Summaries by name, from (name, file) pairs; throughput wrote the files. Raises ValueError and OSError."""
    summaries: dict[str, list[Summary]] = {}
    for name, file in files:
        try:
            summary = Summary(**json.loads(Path(file).read_text(encoding="utf-8"))["summary"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a result of benchmarks.throughput: {error!r}") from None
        if summary.num_failed:
            raise ValueError(f"{file} has failed requests: not comparable")
        summaries.setdefault(name, []).append(summary)
    return summaries


def medians(summaries: Sequence[Summary]) -> dict[str, float]:
    """Median over the runs of each compared figure. `summaries` is not empty, and none has failed requests."""
    return {figure: statistics.median(getattr(summary, figure) for summary in summaries) for figure in COMPARED}


def print_comparison(summaries: Mapping[str, Sequence[Summary]], console: Console) -> None:
    """One column per name: medians with their ratio to the first name, and the range of output tokens/s."""
    first = medians(next(iter(summaries.values())))
    table = Table()
    table.add_column(f"median (ratio to {next(iter(summaries))})")
    for name, runs in summaries.items():
        table.add_column(f"{name}, {len(runs)} runs", justify="right")
    own = [medians(runs) for runs in summaries.values()]
    for figure, heading in COMPARED.items():
        table.add_row(heading, *(f"{values[figure]:,.2f} ({values[figure] / first[figure]:.2f}x)" for values in own))
    rates = [[summary.output_tokens_per_s for summary in runs] for runs in summaries.values()]
    table.add_row("range of output tokens/s", *(f"{min(values):,.1f}-{max(values):,.1f}" for values in rates))
    console.print(table)


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    names = [name for name, _ in args.server]
    if bool(args.server) == bool(args.result):
        parser.error("give either --server or --result")
    if bool(args.server) != bool(args.workload):
        parser.error("--server needs a workload, and --result takes none")
    if len(set(names)) != len(names):
        parser.error("each --server needs a different name")
    if args.rounds < 1:
        parser.error("argument --rounds: must be at least 1")
    try:
        if args.result:
            summaries = read_results(args.result)
        else:
            if args.output_dir is not None:
                args.output_dir.mkdir(parents=True, exist_ok=True)
            summaries = measure_alternately(dict(args.server), args.workload, args.rounds, args.seed, args.output_dir)
    except (ServerError, ValueError, OSError) as error:
        print_error(error)
        return 1
    print_comparison(summaries, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
