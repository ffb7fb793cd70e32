"""Benchmarks the CPU attention backends: speed relative to the machine's best, speed-up from shared prefixes, windows.

`python -m benchmarks.kernels.attention [decode|prefix|window|shared|all|shapes]`
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tokasaurus.model  # noqa: F401 - makes thread settings that torch reads on import
from benchmarks.line_plot import LinePlot, write_line_plots
from benchmarks.results import Check, add_result_arguments, at_least, begin_results, end_results, make_console
from tokasaurus.commands.bench.results import machine_facts

PARTS = ("decode", "prefix", "window", "shared")
MIN_SHARE_OF_READ = 0.5
MIN_SHARE_OF_GEMM = 0.5
MIN_SHARE_OF_SHORT = 0.9
FLEX = "flex"


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of one backend in one layer, or the machine's best speed, against which the backends are compared."""

    part: str
    """"decode", "prefix" or "window"."""
    backend: str
    """Name of the backend; for the machine's best, "read" in decode and "gemm" in prefix."""
    num_rows: int
    """Query rows: one per sequence in decode and window, all rows of the prefix group in prefix; 0 for "read"."""
    num_tokens: int
    """Tokens of each row's context; 0 for the machine's best."""
    ms: float
    """Milliseconds per layer; 0 for the machine's best."""
    amount: float
    """GB/s of keys and values in decode, GFLOP/s in prefix, layers per second in window."""
    share: float
    """`amount` divided by the machine's best, or by that of the shortest context in window, in the same rounds."""


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Time of one layer's attention for the decode rows of a prefix group, without and with a shared prefix."""

    backend: str
    group_size: int
    """Sequences in the group, one decode row each."""
    prefix_len: int
    """Tokens of the shared prefix."""
    whole_ms: float
    """Milliseconds if each row attends to its whole context by itself."""
    split_ms: float
    """Milliseconds for one prefix part for the group, a suffix part for each row, and their merge."""

    @property
    def factor(self) -> float:
        return self.whole_ms / self.split_ms


def measure_decode(args: argparse.Namespace) -> list[Rate]:
    from benchmarks.kernels import attention_cases as cases

    calls, read_bytes = cases.reads()
    candidates = {"read": calls}
    for name in args.backends:
        candidates[name], num_bytes = cases.decode(name, args.sequences, args.tokens)
    if args.flex:
        candidates[FLEX], num_bytes = cases.flex_decode(args.sequences, args.tokens)
    seconds = cases.time_interleaved(candidates, args.rounds)
    best = read_bytes / seconds.pop("read")
    rates = [Rate("decode", "read", 0, 0, 0, best / 1e9, 1.0)]
    for name, taken in seconds.items():
        rate = num_bytes / taken
        rates.append(Rate("decode", name, args.sequences, args.tokens, taken * 1e3, rate / 1e9, rate / best))
    return rates


def measure_prefix(args: argparse.Namespace) -> list[Rate]:
    from benchmarks.kernels import attention_cases as cases

    calls, operations = cases.gemms(max(args.rows))
    candidates = {("gemm", max(args.rows)): calls}
    part_operations = {}
    for num_rows in args.rows:
        for name in args.backends:
            candidates[name, num_rows], part_operations[num_rows] = cases.prefix_part(name, num_rows, args.prefix)
        if args.flex:
            candidates[FLEX, num_rows], part_operations[num_rows] = cases.flex_prefix_part(num_rows, args.prefix)
    seconds = cases.time_interleaved(candidates, args.rounds)
    best = operations / seconds.pop(("gemm", max(args.rows)))
    rates = [Rate("prefix", "gemm", max(args.rows), 0, 0, best / 1e9, 1.0)]
    for (name, num_rows), taken in seconds.items():
        rate = part_operations[num_rows] / taken
        rates.append(Rate("prefix", name, num_rows, args.prefix, taken * 1e3, rate / 1e9, rate / best))
    return rates


def measure_window(args: argparse.Namespace) -> list[Rate]:
    from benchmarks.kernels import attention_cases as cases

    candidates = {
        (name, context): cases.windowed(name, args.window_sequences, context, max(args.contexts), args.window)
        for name in args.backends
        for context in args.contexts
    }
    seconds = cases.time_interleaved(candidates, args.rounds)
    return [
        Rate(
            *("window", name, args.window_sequences, context, taken * 1e3),
            *(1 / taken, seconds[name, min(args.contexts)] / taken),
        )
        for (name, context), taken in seconds.items()
    ]


def measure_shapes(args: argparse.Namespace) -> list[Rate]:
    """Decode rows and ends of prompts by the kernels: sizes of heads, groups of them, types of the cache."""
    import torch

    from benchmarks.kernels import attention_cases as cases

    read_calls, read_bytes = cases.reads()
    gemm_calls, gemm_operations = cases.large_gemm()
    best = cases.time_interleaved({"read": read_calls, "gemm": [*gemm_calls] * 4}, 2)
    read, gemm = read_bytes / best["read"], gemm_operations / best["gemm"]
    rates = [Rate("shapes", "read", 0, 0, 0, read / 1e9, 1.0), Rate("shapes", "gemm", 0, 0, 0, gemm / 1e9, 1.0)]
    for dtype, head_dim in itertools.product(args.dtypes, args.head_dims):
        pool = cases.Pool(getattr(torch, dtype), head_dim, int(args.pool_gib * 2**30))
        for group in args.heads_per_kv:
            name = f"{dtype}, head size {head_dim}, group {group}"
            for num_sequences, num_tokens in itertools.product(args.decode_rows, args.contexts):
                num_bytes = num_sequences * num_tokens * pool.token_bytes
                calls = pool.calls(group, num_sequences, 1, num_tokens, max(2, min(12, 10**9 // num_bytes)))
                taken = cases.time_interleaved({name: calls}, 2)[name]
                rate = num_bytes / taken
                rates.append(Rate("shapes", name, num_sequences, num_tokens, taken * 1e3, rate / 1e9, rate / read))
            for num_tokens in args.contexts:
                num_rows, num_heads = min(num_tokens, 1024), pool.shape(group).num_heads
                operations = 4 * num_heads * head_dim * sum(range(num_tokens - num_rows + 1, num_tokens + 1))
                taken = cases.time_interleaved({name: pool.calls(group, 1, num_rows, num_tokens, 1)}, 2)[name]
                rate = operations / taken
                prompt = f"{name}, prompt, GFLOP/s"
                rates.append(Rate("shapes", prompt, num_rows, num_tokens, taken * 1e3, rate / 1e9, rate / gemm))
    return rates


def measure_shared(args: argparse.Namespace) -> list[SpeedUp]:
    from benchmarks.kernels import attention_cases as cases

    found = []
    for name in args.backends:
        for group_size in args.groups:
            for prefix_len in args.prefixes:
                group = cases.group(name, group_size, prefix_len, args.suffix)
                seconds = cases.time_interleaved({"whole": group.whole, "split": group.split}, args.rounds)
                found.append(SpeedUp(name, group_size, prefix_len, seconds["whole"] * 1e3, seconds["split"] * 1e3))
    return found


def print_rates(title: str, unit: str, rates: Sequence[Rate], console: Console) -> None:
    table = Table("", "rows", "tokens", "ms per layer", unit, "share of best", title=title, title_justify="left")
    for rate in rates:
        sizes = [f"{number:,}" if number else "" for number in (rate.num_rows, rate.num_tokens)]
        taken = f"{rate.ms:.3f}" if rate.ms else ""
        table.add_row(rate.backend, *sizes, taken, f"{rate.amount:,.1f}", f"{rate.share:.2f}")
    console.print(table)


def print_speed_ups(speed_ups: Sequence[SpeedUp], console: Console) -> None:
    prefixes = sorted({speed_up.prefix_len for speed_up in speed_ups})
    for backend in dict.fromkeys(speed_up.backend for speed_up in speed_ups):
        title = f"{backend}: speed-up of a prefix group from a shared prefix (whole / split time)"
        table = Table("group", *(f"{prefix:,} tokens" for prefix in prefixes), title=title, title_justify="left")
        for group_size in sorted({speed_up.group_size for speed_up in speed_ups}):
            row = {
                speed_up.prefix_len: f"{speed_up.factor:.2f} ({speed_up.whole_ms:.3f} / {speed_up.split_ms:.3f} ms)"
                for speed_up in speed_ups
                if speed_up.backend == backend and speed_up.group_size == group_size
            }
            table.add_row(str(group_size), *(row[prefix] for prefix in prefixes))
        console.print(table)


def plot_speed_ups(path: Path, speed_ups: Sequence[SpeedUp]) -> None:
    lines: dict[str, dict[float, float]] = {}
    for speed_up in speed_ups:
        lines.setdefault(f"{speed_up.backend}, {speed_up.group_size} rows", {})[speed_up.prefix_len] = speed_up.factor
    plot = LinePlot("Shared-prefix attention", "tokens of the shared prefix", "speed-up", lines)
    write_line_plots(path, [plot])


def check_rates(rates: Sequence[Rate]) -> list[Check]:
    """Limits apply to the cpu backend only, and in the prefix part only to the largest number of rows."""
    checks = []
    for rate in rates:
        if rate.backend != "cpu":
            continue
        if rate.part == "decode":
            checks.append(at_least("decode: KV bandwidth over read bandwidth", rate.share, MIN_SHARE_OF_READ))
        elif rate.part == "window":
            checks.append(at_least("window: speed over that of the shortest context", rate.share, MIN_SHARE_OF_SHORT))
        elif rate.num_rows == max(other.num_rows for other in rates):
            checks.append(at_least("prefix part: GFLOP/s over gemm GFLOP/s", rate.share, MIN_SHARE_OF_GEMM))
    return checks


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all", "shapes"])
    parser.add_argument("--backends", nargs="+", default=["cpu", "torch"], choices=["cpu", "torch"])
    parser.add_argument("--flex", action="store_true", help="also measure compiled flex_attention in decode and prefix")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of torch and the kernels (default: torch's)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="measured rounds over all candidates (default: 10)"
    )
    add_result_arguments(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="plot the speed-up from shared prefixes to FILE")
    decode = parser.add_argument_group("decode")
    decode.add_argument("--sequences", type=int, default=64, metavar="N")
    decode.add_argument("--tokens", type=int, default=600, metavar="N", help="context of each sequence (default: 600)")
    prefix = parser.add_argument_group("prefix")
    prefix.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128, 512], metavar="N")
    prefix.add_argument("--prefix", type=int, default=1024, metavar="N", help="tokens of the prefix (default: 1024)")
    window = parser.add_argument_group("window")
    window.add_argument("--window", type=int, default=512, metavar="N", help="tokens of the window (default: 512)")
    window.add_argument("--window-sequences", type=int, default=8, metavar="N")
    window.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000, 32000], metavar="N")
    shapes = parser.add_argument_group("shapes", "with the contexts of window")
    shapes.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "int8"], metavar="NAME")
    shapes.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="N")
    shapes.add_argument("--heads-per-kv", type=int, nargs="+", default=[1, 4, 8], metavar="N")
    shapes.add_argument("--decode-rows", type=int, nargs="+", default=[1, 8, 64], metavar="N")
    shapes.add_argument(
        "--pool-gib", type=float, default=0.6, metavar="GIB", help="more than the caches' (default: 0.6)"
    )
    shared = parser.add_argument_group("shared")
    shared.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 32, 128], metavar="N")
    shared.add_argument("--prefixes", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="N")
    shared.add_argument(
        "--suffix", type=int, default=64, metavar="N", help="tokens of each sequence after the prefix (default: 64)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if --check was given and a limit was missed, otherwise 0."""
    args = parse(argv)
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    console = make_console(120)
    found = begin_results(args, machine_facts("torch") | {"threads": torch.get_num_threads()}, console)
    checks: list[Check] = []
    parts = PARTS if args.part == "all" else [args.part]
    if "decode" in parts:
        found["decode"] = rates = measure_decode(args)
        print_rates("Decode, cycling through the KV caches of 30 layers", "GB/s", rates, console)
        checks += check_rates(rates)
    if "prefix" in parts:
        found["prefix"] = rates = measure_prefix(args)
        print_rates("Rows of a prefix group attending to their shared prefix", "GFLOP/s", rates, console)
        checks += check_rates(rates)
    if "window" in parts:
        found["window"] = rates = measure_window(args)
        title = f"Decode in layers with a window of {args.window:,} tokens"
        print_rates(title, "layers/s", rates, console)
        checks += check_rates(rates)
    if "shapes" in parts:
        found["shapes"] = rates = measure_shapes(args)
        print_rates("Decode rows and ends of prompts", "GB/s or GFLOP/s", rates, console)
    if "shared" in parts:
        found["shared"] = speed_ups = measure_shared(args)
        print_speed_ups(speed_ups, console)
        if args.svg is not None:
            plot_speed_ups(args.svg, speed_ups)
    return end_results(found, checks, args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
