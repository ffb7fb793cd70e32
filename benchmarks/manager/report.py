"""Tables and limits of the manager's benchmark."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.manager.occupancy import OccupancyResult
from benchmarks.manager.parts import Shares, Timing
from benchmarks.manager.process import ProcessCost
from benchmarks.results import Check, at_least, at_most

HEADLINE_SEQUENCES = 8192
MAX_US_PER_TOKEN = 1.2
MAX_GROWTH = 1.2
MAX_BYTES_PER_ROW = 64
MAX_SIMULATION_MS = 10
MAX_MATCH_MS = 1
MIN_OCCUPANCY = 0.85
MAX_PREEMPTED_SHARE = 0.02
MIN_SHARE_RUNNING = 0.95


def lengths_name(is_known: bool) -> str:
    return "known" if is_known else "eos at random"


def check_costs(costs: Sequence[ProcessCost], shares: Sequence[Shares]) -> list[Check]:
    """CPU time is limited only in runs with eos at random, in which length predictor and KV simulation have work."""
    checks = []
    us_per_token = {cost.num_sequences: cost.manager_us_per_token for cost in costs if not cost.is_known}
    if HEADLINE_SEQUENCES in us_per_token:
        name = f"manager CPU at {HEADLINE_SEQUENCES:,} sequences, µs per token"
        checks.append(at_most(name, us_per_token[HEADLINE_SEQUENCES], MAX_US_PER_TOKEN))
    least, most = min(us_per_token), max(us_per_token)
    if least < most:
        name = f"manager CPU per token at {most:,} sequences over {least:,} sequences"
        checks.append(at_most(name, us_per_token[most] / us_per_token[least], MAX_GROWTH))
    min_running = min(cost.mean_running / cost.num_sequences for cost in costs)
    checks.append(at_least("mean running sequences over sequences asked for", min_running, MIN_SHARE_RUNNING))
    bytes_per_row = max([cost.bytes_per_row for cost in costs] + [one.bytes_per_row for one in shares])
    checks.append(at_most("bytes to the worker per decode row", bytes_per_row, MAX_BYTES_PER_ROW))
    torch_imported = [cost.torch_imported for cost in costs] + [one.torch_imported for one in shares]
    checks.append(at_most("runs in which torch was imported", sum(torch_imported), 0))
    return checks


def check_timings(what: str, timings: Sequence[Timing], limit_ms: float) -> list[Check]:
    return [at_most(f"{what}: {timing.name}, ms", timing.median_ms, limit_ms) for timing in timings]


def check_occupancy(result: OccupancyResult) -> list[Check]:
    name = f"running sequences, lengths predicted over known ({result.lengths})"
    return [
        at_least(name, result.ratio, MIN_OCCUPANCY),
        at_most(
            "tokens computed again after preemption, share of all",
            result.predicted.preempted_share,
            MAX_PREEMPTED_SHARE,
        ),
    ]


def _table(*columns: str) -> Table:
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _print_title(title: str, console: Console) -> None:
    console.print(f"\n{title}", soft_wrap=True)  # a table would wrap its title at its own width


def print_costs(costs: Sequence[ProcessCost], console: Console) -> None:
    _print_title(
        "A real manager process: CPU time of all its threads (median of the windows, minimum to maximum)", console
    )
    table = _table(
        "completion lengths",
        "sequences",
        "running",
        "waiting",
        "manager, µs per token",
        "worker",
        "tokens/s",
        "bytes/row",
        "preemptions",
    )
    for cost in costs:
        table.add_row(
            lengths_name(cost.is_known),
            f"{cost.num_sequences:,}",
            f"{cost.mean_running:,.0f}",
            f"{cost.mean_waiting:,.0f}",
            f"{cost.manager_us_per_token:.3f} ({cost.min_us_per_token:.3f} to {cost.max_us_per_token:.3f})",
            f"{cost.worker_us_per_token:.3f}",
            f"{cost.tokens_per_s:,.0f}",
            f"{cost.bytes_per_row:.1f}",
            f"{cost.preemptions:,}",
        )
    console.print(table)


def print_shares(shares: Sequence[Shares], console: Console) -> None:
    """CPU time by section. All shares have the same mean prompt length and the same `is_known`."""
    names = list(dict.fromkeys(name for one in shares for name in one.sections))
    kind = lengths_name(shares[0].is_known)
    _print_title(f"Parts of the manager in one process, CPU µs per token; completion lengths: {kind}", console)
    table = _table("part", *(f"{one.num_sequences:,} sequences" for one in shares))
    for name in names:
        parts = [one.sections.get(name, 0.0) for one in shares]
        cells = [f"{part:.3f} {part / one.us_per_token:4.0%}" for part, one in zip(parts, shares, strict=True)]
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("all", *(f"{one.us_per_token:.3f} 100%" for one in shares))
    table.add_row("µs per step", *(f"{one.us_per_step:,.0f}" for one in shares))
    table.add_row("running", *(f"{one.mean_running:,.0f}" for one in shares))
    console.print(table)


def print_bytes(shares: Sequence[Shares], console: Console) -> None:
    _print_title("Bytes to the worker per decode row: all messages over all decode rows", console)
    table = _table("prompt tokens", "sequences", "bytes", "of which prompts")
    for one in shares:
        table.add_row(
            f"{one.mean_prompt_tokens:,}",
            f"{one.num_sequences:,}",
            f"{one.bytes_per_row:.1f}",
            f"{one.prompt_bytes_per_row:.1f}",
        )
    console.print(table)


def print_timings(title: str, timings: Sequence[Timing], console: Console) -> None:
    _print_title(title, console)
    table = _table("", "median, ms", "slowest, ms", "calls")
    for timing in timings:
        table.add_row(timing.name, f"{timing.median_ms:.3f}", f"{timing.slowest_ms:.3f}", str(timing.num_calls))
    console.print(table)


def print_occupancy(result: OccupancyResult, console: Console) -> None:
    lengths = f"{result.lengths}, mean {result.mean_length:.0f} tokens"
    title = f"{result.num_sequences:,} completions ({lengths}), {result.num_wanted:,} at a time"
    _print_title(f"{title}, on {result.num_kv_tokens:,} KV tokens", console)
    table = _table("", "running, warm", "running, whole run", "steps", "preemptions", "tokens computed again")
    for name, one in (("lengths predicted", result.predicted), ("lengths known", result.known)):
        table.add_row(
            name,
            f"{one.mean_running_warm:,.1f}",
            f"{one.mean_running:,.1f}",
            f"{one.num_steps:,}",
            f"{one.num_preemptions:,}",
            f"{one.preempted_share:.3%}",
        )
    console.print(table)
