"""Throughput, cached share, fairness and recovery of 1 to 1,000 replicas behind the router, simulated.

Real managers and the real router, whose devices take the estimated time of an H100's steps; nothing here was measured
on a GPU. `--real` compares predictions with one and two real replicas on this machine. `--router` measures the index.
"""

import argparse
import math
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.line_plot import LinePlot, write_line_plots
from benchmarks.results import Check, add_result_arguments, at_most, begin_results, end_results, make_console
from benchmarks.scale import check, router
from benchmarks.scale.figures import Figures, figures_of
from benchmarks.scale.load import Shape, plan
from benchmarks.scale.replica import make_options
from benchmarks.scale.simulation import Deaths, RollingUpdate, Simulation, choose_least_busy
from benchmarks.scale.step_times import H100_8B
from tokasaurus.commands.bench.results import machine_facts
from tokasaurus.manager.state.engine_state import EngineOptions
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.replicas import choose_replica

# A small KV cache, so that a short run fills it.
LIMITS = EngineLimits(2048, 16, 4096, seconds_per_step=H100_8B.per_step)
OPTIONS: EngineOptions = make_options(LIMITS, max_seqs_per_forward=12, max_tokens_per_forward=2048)
RESTART_S = 1.0
PARTS = ("steady", "by load alone", "deaths", "update", "crowded")
MAX_ERROR = 0.10


def shape(num_replicas: int, turns: int) -> Shape:
    """Eight prefixes for each replica, of which the most common comes with every tenth request of 1,000 replicas."""
    return Shape(16 * num_replicas, turns, 8 * num_replicas, 512, (32, 96), (8, 32))


def run_part(part: str, num_replicas: int, turns: int, seed: int) -> Figures:
    some = math.ceil(num_replicas / 20)
    asked = shape(num_replicas, turns)
    if part == "crowded":  # five sessions for each row of a step, nine of ten of them of one client
        asked = replace(asked, sessions=60 * num_replicas, turns=1, heavy_share=0.9)
    simulation = Simulation(
        plan(asked, seed),
        num_replicas,
        OPTIONS,
        H100_8B,
        choose_least_busy if part == "by load alone" else choose_replica,
        Deaths(0.3, some, RESTART_S) if part == "deaths" else None,
        RollingUpdate(0.3, math.ceil(num_replicas / 4), RESTART_S / 4) if part == "update" else None,
    )
    return figures_of(simulation.run())


def simulate(args: argparse.Namespace, console: Console) -> dict[str, object]:
    found: dict[str, dict[int, Figures]] = {part: {} for part in args.parts}
    for num_replicas in args.replicas:
        for part in args.parts:
            start_s = time.perf_counter()
            found[part][num_replicas] = run_part(part, num_replicas, args.turns, args.seed)
            console.print(f"{part}, {num_replicas:,} replicas: {time.perf_counter() - start_s:.1f} s of this machine")
    for part in args.parts:
        console.print(table_of(part, found[part]))
    if args.picture is not None:
        lines = {
            part: {float(number): figures.tokens_per_s / number for number, figures in of_part.items()}
            for part, of_part in found.items()
            if part != "crowded"  # another load
        }
        title = "Simulated: tokens/s of each replica"
        plot = LinePlot(title, "replicas", "generated tokens/s per replica", lines)
        write_line_plots(args.picture, [plot])
    return {
        part: {number: asdict(figures) for number, figures in of_part.items()} for part, of_part in found.items()
    } | {"step_times": asdict(H100_8B)}


def table_of(part: str, found: dict[int, Figures]) -> Table:
    table = Table(title=f"{part} (simulated)", title_justify="left")
    columns = "replicas|tokens/s|each|cached|findable|busy|busiest|median s|p99 s|light / heavy|choice µs|run again"
    columns += "|slowest s|recovered s|updated s"
    for column in columns.split("|"):
        table.add_column(column, justify="right")
    for number, one in found.items():
        table.add_row(
            f"{number:,}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / number:,.0f}",
            f"{one.cached_share:.3f}",
            f"{one.best_share:.3f}",
            f"{one.busy_share:.3f}",
            f"{one.busiest:.2f}",
            f"{one.median_s:.2f}",
            f"{one.p99_s:.2f}",
            f"{one.light_over_heavy:.2f}",
            f"{one.routing_us:,.0f}",
            f"{one.num_again:,}",
            f"{one.slowest_again_s:.2f}",
            f"{one.recovered_s:.2f}",
            f"{one.updated_s:.2f}",
        )
    return table


def compare_with_real(rounds: int, console: Console) -> tuple[dict[str, object], list[Check]]:
    runs: dict[int, list[check.Comparison]] = {1: [], 2: []}
    for number in range(rounds):
        for num_replicas, of_replicas in runs.items():
            one = check.predict(check.measure(num_replicas, seed=number))
            of_replicas.append(one)
            console.print(
                f"{num_replicas} replicas: measured {one.num_tokens / one.measured_s:,.1f} tokens/s, "
                f"predicted {one.num_tokens / one.predicted_s:,.1f} (ratio {one.ratio:.3f}); "
                f"cached {one.measured_cached:.3f}, predicted {one.predicted_cached:.3f}"
            )
    checks = [
        at_most(f"{number} replicas: |predicted / measured - 1|", abs(check.median_ratio(of_replicas) - 1), MAX_ERROR)
        for number, of_replicas in runs.items()
    ]
    return {str(number): [asdict(one) for one in of_replicas] for number, of_replicas in runs.items()}, checks


def measure_router(replicas: list[int], console: Console) -> dict[str, object]:
    table = Table(title="The router's indexes, each full", title_justify="left")
    for column in ("replicas", "choice µs", "index MB", "bytes per cached token"):
        table.add_column(column, justify="right")
    found: dict[str, object] = {}
    for number in replicas:
        runs = [router.measure(number, LIMITS, prompt_tokens=576, seed=seed) for seed in range(3)]
        choice_us = statistics.median(run.choice_us for run in runs)
        bytes_per_token = runs[0].index_bytes / runs[0].num_index_tokens
        megabytes = number * runs[0].index_bytes / 1e6
        table.add_row(f"{number:,}", f"{choice_us:,.0f}", f"{megabytes:,.2f}", f"{bytes_per_token:.1f}")
        found[str(number)] = [asdict(run) for run in runs]
    console.print(table)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 10, 100, 1000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--turns", type=int, default=3, help="requests of each of a replica's 16 sessions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a picture (SVG) to FILE")
    parser.add_argument("--real", action="store_true", help="compare with real replicas instead, two minutes a round")
    parser.add_argument("--rounds", type=int, default=3, help="of --real")
    parser.add_argument("--router", action="store_true", help="measure the router's index instead")
    add_result_arguments(parser)
    args = parser.parse_args()
    console = make_console(160)
    results = begin_results(args, machine_facts("numpy"), console)
    checks: list[Check] = []
    if args.real:
        found, checks = compare_with_real(args.rounds, console)
    elif args.router:
        found = measure_router(args.replicas, console)
    else:
        found = simulate(args, console)
    return end_results(results | {"found": found}, checks, args, console)


if __name__ == "__main__":
    sys.exit(main())
