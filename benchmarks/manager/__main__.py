"""Benchmarks the manager without a model: its CPU time per token, and how full it keeps the KV cache.

`python -m benchmarks.manager [cpu|simulation|prefix|occupancy|all]`
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from benchmarks.manager import report
from benchmarks.manager.occupancy import measure_occupancy
from benchmarks.manager.parts import measure_prefix_match, measure_shares, measure_simulation
from benchmarks.manager.process import measure_process
from benchmarks.results import Check, add_result_arguments, begin_results, end_results, make_console
from tokasaurus.commands.bench.results import machine_facts, progress_bar

PARTS = ("cpu", "simulation", "prefix", "occupancy")
LONG_PROMPT_TOKENS = 4000
NUM_SEQUENCES_OF_LONG_PROMPTS = 1024


@contextmanager
def step_progress(description: str, num_steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar for about `num_steps` steps. Yields a function to call after each step."""
    num_done = 0
    with progress_bar(description) as show:

        def advance() -> None:
            nonlocal num_done
            num_done += 1
            if num_done % 16 == 0:
                show(min(1.0, num_done / num_steps))

        yield advance


def run_cpu(args: argparse.Namespace, console: Console) -> tuple[dict[str, object], list[Check]]:
    costs, shares, num_steps = [], [], args.warm_steps + args.steps
    for is_known in (False, True):
        name = report.lengths_name(is_known)
        for num_sequences in args.sequences:
            with progress_bar(f"{num_sequences:,} sequences, completion lengths: {name}") as show:
                cost = measure_process(
                    num_sequences, is_known, args.warm_steps, args.windows, args.window_seconds, show
                )
            costs.append(cost)
    report.print_costs(costs, console)
    for is_known in (False, True):
        for num_sequences in args.sequences:
            with step_progress(f"parts, {num_sequences:,} sequences", num_steps) as advance:
                shares.append(measure_shares(num_sequences, is_known, args.warm_steps, args.steps, advance))
        report.print_shares([one for one in shares if one.is_known == is_known], console)
    num_long = min(NUM_SEQUENCES_OF_LONG_PROMPTS, min(args.sequences))
    with step_progress(f"prompts of {LONG_PROMPT_TOKENS:,} tokens", num_steps) as advance:
        long = measure_shares(num_long, False, args.warm_steps, args.steps, advance, LONG_PROMPT_TOKENS)
    report.print_bytes([*(one for one in shares if not one.is_known), long], console)
    return {"processes": costs, "parts": [*shares, long]}, report.check_costs(costs, [*shares, long])


def run_simulation(args: argparse.Namespace, console: Console) -> tuple[dict[str, object], list[Check]]:
    with step_progress("simulation", 800) as advance:
        timings = measure_simulation(report.HEADLINE_SEQUENCES, args.calls, advance)
    report.print_timings("One KV simulation of all running sequences, until the last one ends", timings, console)
    return {"simulation": timings}, report.check_timings("simulation", timings, report.MAX_SIMULATION_MS)


def run_prefix(args: argparse.Namespace, console: Console) -> tuple[dict[str, object], list[Check]]:
    timings = measure_prefix_match(100_000, 4000, args.calls)
    report.print_timings("Match of one cached prompt in the prefix tree", timings, console)
    return {"prefix": timings}, report.check_timings("match", timings, report.MAX_MATCH_MS)


def run_occupancy(args: argparse.Namespace, console: Console) -> tuple[dict[str, object], list[Check]]:
    with step_progress("occupancy", 6000) as advance:
        result = measure_occupancy(args.lengths, args.wanted, args.completions, args.seed, advance)
    report.print_occupancy(result, console)
    return {"occupancy": result}, report.check_occupancy(result)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.manager", description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    add_result_arguments(parser)
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--sequences", type=int, nargs="+", default=[1024, 4096, 8192, 16384], metavar="N")
    cpu.add_argument(
        "--warm-steps", type=int, default=1280, metavar="N", help="steps before the measurement (default: 1280)"
    )
    cpu.add_argument(
        "--windows", type=int, default=5, metavar="N", help="measured windows of the real manager process (default: 5)"
    )
    cpu.add_argument("--window-seconds", type=float, default=3.0, metavar="S", help="length of a window (default: 3)")
    cpu.add_argument(
        "--steps",
        type=int,
        default=512,
        metavar="N",
        help="measured steps of the manager in this process (default: 512)",
    )
    alone = parser.add_argument_group("simulation, prefix")
    alone.add_argument("--calls", type=int, default=100, metavar="N", help="timed calls of each case (default: 100)")
    occupancy = parser.add_argument_group("occupancy")
    occupancy.add_argument("--lengths", default="gsm8k", choices=["gsm8k", "lognormal"])
    occupancy.add_argument(
        "--wanted", type=int, default=2048, metavar="N", help="sequences that run or wait at a time (default: 2048)"
    )
    occupancy.add_argument(
        "--completions", type=int, default=20_000, metavar="N", help="completions in all (default: 20000)"
    )
    occupancy.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"argument --json: there is no directory {args.json.parent}")
    return args


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if --check was given and a limit was missed, otherwise 0."""
    args = parse(argv)
    console = make_console(120)
    found = begin_results(args, machine_facts("numpy"), console)
    run = {"cpu": run_cpu, "simulation": run_simulation, "prefix": run_prefix, "occupancy": run_occupancy}
    checks: list[Check] = []
    for part in PARTS if args.part == "all" else [args.part]:
        figures, part_checks = run[part](args, console)
        found |= figures
        checks += part_checks
    return end_results(found, checks, args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
