"""`toka bench` and `toka bench compare`: the servers in turns, round by round, and what is shown of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from tokasaurus.commands.bench.client import RequestResult, ServerError
from tokasaurus.commands.bench.compare import (
    NotComparable,
    compare,
    compare_measured,
    of_json,
    print_comparison,
    read_runs,
)
from tokasaurus.commands.bench.config import BenchConfig, CompareConfig, raise_unused
from tokasaurus.commands.bench.figures import TIMES, Spread, rows
from tokasaurus.commands.bench.measure import OWN_NAME, Run, measure, requests_of, write_runs
from tokasaurus.commands.bench.peers import program_of, started
from tokasaurus.commands.bench.results import console, print_error, write_json
from tokasaurus.commands.bench.workloads import OfferedRequest
from tokasaurus.commands.running_server import url_of_server
from tokasaurus.messages.status import UserError
from tokasaurus.processes.stop_signals import Stopped, signals_raise

_MAX_KINDS = 8
"""Kinds of failures that are shown."""


@dataclass(frozen=True, slots=True)
class _Server:
    """One that is measured."""

    name: str
    url: str
    """Up to and including /v1; empty for one that is started."""


def servers_of(config: BenchConfig) -> list[_Server]:
    """The servers to measure, in the order of the first round."""
    servers = [_Server(name, api_url(url) if url else "") for name, url in config.peers()]
    if config.base_url is not None or config.unix_socket is not None or not servers:
        servers.insert(0, _Server(OWN_NAME, api_url(url_of_server(config))))
    return servers


def api_url(url: str) -> str:
    """The URL of the API: without a slash at the end, and with /v1 if it has no path."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"


def round_orders(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """Order of the servers in each round, reversed in every second one: a machine that slows down then favours none."""
    return [list(names) if number % 2 == 0 else list(reversed(names)) for number in range(num_rounds)]


def run_bench(config: BenchConfig, words: list[str]) -> int:
    """Measures, prints and writes; call from the main thread. Returns the exit code: 1 if a request failed or a server
    cannot be measured, 128 + N if stopped by signal N.

    What was measured until then is written. Raises FlagError for a workload that cannot be made or has no such flag."""
    raise_unused(config, words)
    servers = {server.name: server for server in servers_of(config)}
    seeds = [config.seed + number for number in range(config.num_rounds)]
    of_round = [requests_of(config, seed) for seed in seeds]
    out, err = console(), Console(stderr=True, highlight=False)
    runs: list[Run] = []
    exit_code = 0
    try:
        with signals_raise():
            for run in _measured(config, servers, seeds, of_round):
                runs.append(run)
                if len(servers) * config.num_rounds > 1:
                    rate = f"{run.summary.output_tokens_per_s:,.1f} output tokens/s"
                    err.print(f"seed {run.seed}, {run.name}: {rate}", markup=False, soft_wrap=True)
                _print_failures(run.requests, err)
                exit_code |= 1 if run.summary.num_failed else 0
    except (ServerError, UserError) as error:
        print_error(error)
        exit_code = 1
    except Stopped as stopped:
        print_error("toka bench: stopped")
        exit_code = 128 + stopped.number
    if runs:
        whole = [run for run in runs if not run.summary.num_failed]
        if len(runs) == 1:
            print_run(runs[0], out)
        elif whole:
            if len(whole) < len(runs):
                print_error(_left_out(len(runs) - len(whole)))
            print_comparison(compare(whole), out)
        try:
            if config.output is not None:
                write_runs(Path(config.output), runs)
            if config.html is not None and whole:
                from tokasaurus.commands.bench.html import write_html

                write_html(Path(config.html), whole)
        except OSError as error:
            print_error(f"{error.filename}: {error.strerror}")
            exit_code = exit_code or 1
    return exit_code


def _measured(
    config: BenchConfig, servers: Mapping[str, _Server], seeds: Sequence[int], of_round: Sequence[list[OfferedRequest]]
) -> Iterator[Run]:
    """Each run when it is done. Raises ServerError, before the first one if a program is missing."""
    for server in servers.values():
        if not server.url:
            program_of(server.name, (config.peer_env or {}).get(server.name))
    for number, names in enumerate(round_orders(list(servers), len(seeds))):
        for name in names:
            with _reached(config, servers[name]) as (url, command):
                model = config.model if command is None else None
                yield asyncio.run(measure(config, of_round[number], name, url, model, seeds[number], command))


def _left_out(num_runs: int) -> str:
    return f"{num_runs} runs with failed requests are left out of the comparison"


@contextmanager
def _reached(config: BenchConfig, server: _Server) -> Iterator[tuple[str, str | None]]:
    """(URL, the command that started it; None if it runs already). Raises ServerError."""
    if server.url:
        yield server.url, None
        return
    name = server.name
    model = (config.peer_model or {}).get(name, config.model)
    environment, arguments = (config.peer_env or {}).get(name), (config.peer_args or {}).get(name, "")
    with started(name, model, environment, arguments, config.start_timeout) as one:
        yield one.base_url, one.command


def print_run(run: Run, console: Console) -> None:
    """Two tables: totals, and times."""
    # a table would wrap its title at its own width
    console.print(f"{run.workload} at {run.server['url']}", markup=False, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, show, value in rows(run.summary):
        table.add_row(name, "–" if value is None else show(value))
    figures = run.server_figures
    shares = {
        "KV cache, most in use": figures.kv_peak,
        "prompt tokens cached": figures.cached_share,
        "device idle": figures.idle_share,
    }
    for name, share in shares.items():
        if share is not None:
            table.add_row(name, f"{share:.1%}")
    if figures.preemptions is not None:
        table.add_row("preemptions", f"{figures.preemptions:,.0f}")
    console.print(table)
    _print_times(run, console)


def _print_times(run: Run, console: Console) -> None:
    times = Table("milliseconds")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        times.add_column(heading, justify="right")
    for field, name in TIMES.items():
        spread: Spread | None = getattr(run.summary, field)
        if spread is not None:
            values = (spread.mean, *spread.percentiles.values(), spread.max)
            times.add_row(name, *(f"{1000 * value:,.1f}" for value in values))
    if times.row_count:
        console.print(times)


def _print_failures(results: Sequence[RequestResult], console: Console) -> None:
    """Each kind of failure with its count, the most frequent first."""
    kinds = Counter(result.error for result in results if result.error is not None)
    for error, count in kinds.most_common(_MAX_KINDS):
        console.print(f"failed ({count} requests): {error}", style="red", markup=False, soft_wrap=True)
    if len(kinds) > _MAX_KINDS:
        console.print(f"and {len(kinds) - _MAX_KINDS} other kinds of failure", style="red")


def run_compare(config: CompareConfig, files: Sequence[str]) -> int:
    """`toka bench compare`. Returns the exit code."""
    try:
        runs = read_runs([Path(file) for file in files])
    except NotComparable as error:
        print_error(error)
        return 1
    whole = [run for run in runs if not run["summary"]["num_failed"]]
    if len(whole) < len(runs):
        print_error(_left_out(len(runs) - len(whole)))
    if not whole:
        return 1
    comparison = compare_measured([of_json(run) for run in whole])
    print_comparison(comparison, console())
    try:
        if config.output is not None:
            write_json(Path(config.output), comparison)
        if config.html is not None:
            from tokasaurus.commands.bench.html import write_html_of

            write_html_of(Path(config.html), whole)
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}")
        return 1
    return 0
