"""Durable batches against live requests, and a batch of 50,000 lines: `python -m benchmarks.batches --help`.

Each part starts a server of its own, with the flags that are given.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batches.client import BatchClient, open_batch_client, write_large_file, write_requests
from benchmarks.batches.first_token import LOADS, first_token_times
from benchmarks.results import make_console
from benchmarks.server.own_server import ServerWatch, own_server, watched_server
from tokasaurus.commands.bench import workloads
from tokasaurus.commands.bench.client import ClientOptions, ServerError, open_client
from tokasaurus.commands.bench.config import TOKENS_PER_WORD
from tokasaurus.commands.bench.results import print_error
from tokasaurus.commands.bench.workloads import OfferedRequest

MIN_THROUGHPUT_RATIO = 0.97
MAX_FIRST_TOKEN_RATIO = 1.3
MAX_VALIDATION_S = 10.0
MAX_HEALTH_S = 0.05
MAX_GROWTH_BYTES = 100_000_000

NUM_LINES = 50_000
WORDS_PER_PROMPT = {"short lines": 10, "150 MB": 550}
RUN_S = 20.0
"""How long lines of a large file run, before the batch is cancelled."""
NUM_SLOTS = 32
"""Sequences that run at once where the load is larger than that."""
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    value: str
    target: str = ""
    passed: bool | None = None
    """None: it has no target."""


def measure_throughput(flags: Sequence[str], num_rounds: int, num_requests: int) -> list[Measured]:
    """The same requests as a batch and live, all at once; the ways take turns, each round has other requests."""
    rates: dict[str, list[float]] = {"live": [], "batch": []}
    with own_server(flags) as server:
        for number in range(num_rounds):
            requests = short_requests(num_requests, number)
            for way in rates if number % 2 == 0 else reversed(rates):
                ask = ask_live if way == "live" else ask_batch
                seconds = asyncio.run(ask(server.base_url, requests, f"{way} {number}"))
                rates[way].append(sum(request.max_tokens for request in requests) / seconds)
                print(
                    f"throughput, round {number + 1}, {way}: {rates[way][-1]:.1f} tokens/s, {seconds:.1f} s", flush=True
                )
    ratios = [batch / live for batch, live in zip(rates["batch"], rates["live"], strict=True)]
    ratio = statistics.median(ratios)
    return [
        *(Measured(f"{way}, output tokens/s, median", f"{statistics.median(rates[way]):.1f}") for way in rates),
        Measured(
            f"throughput of a batch / live, median of {num_rounds} rounds",
            f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"at least {MIN_THROUGHPUT_RATIO}",
            ratio >= MIN_THROUGHPUT_RATIO,
        ),
    ]


def measure_first_token(flags: Sequence[str], num_rounds: int, num_requests: int) -> list[Measured]:
    """Live requests beside a batch, and beside the same requests sent live: once all run, once there are more than
    slots, as many of which are in flight live."""
    rows = []
    full = [*(flag for flag in flags if "max_seqs_per_forward" not in flag), f"max_seqs_per_forward={NUM_SLOTS}"]
    for name, own_flags, make_requests, num_at_once in (
        (f"all {num_requests} run", flags, _long_requests, num_requests),
        (f"{NUM_SLOTS} run, others wait", full, _more_requests, NUM_SLOTS),
    ):
        seconds: dict[str, list[float]] = {load: [] for load in LOADS}
        with own_server(own_flags) as server:
            for number in range(num_rounds):
                for load in LOADS if number % 2 == 0 else reversed(LOADS):
                    requests = make_requests(num_requests, number)
                    found = asyncio.run(first_token_times(server.base_url, load, requests, num_at_once, number))
                    print(f"first token, {name}, beside {load}: median {statistics.median(found):.3f} s", flush=True)
                    seconds[load] += found
        medians = {load: statistics.median(seconds[load]) for load in LOADS}
        ratio = medians["batch"] / medians["live"]
        shown = ", ".join(f"{load} {medians[load]:.3f} s" for load in LOADS)
        rows.append(
            Measured(
                f"time to first token beside a batch / live load, {name} ({shown})",
                f"{ratio:.2f}",
                f"at most {MAX_FIRST_TOKEN_RATIO}",
                ratio <= MAX_FIRST_TOKEN_RATIO,
            )
        )
    return rows


def measure_large_files(flags: Sequence[str], num_lines: int) -> list[Measured]:
    """Upload, validation, a few lines and cancelling of a file of short lines, and of a large one."""
    rows = []
    for name, num_words in WORDS_PER_PROMPT.items():
        with tempfile.TemporaryDirectory() as directory, own_server(flags) as server:
            path = Path(directory) / "large.jsonl"
            write_large_file(path, num_lines, num_words)
            asyncio.run(_warm_up(server.base_url))
            with watched_server(server) as watch:
                times = asyncio.run(_run_large(server.base_url, path, num_lines))
            size = f"{num_lines:,} lines, {path.stat().st_size / 1e6:.0f} MB"
        rows += large_rows(f"{name} ({size})", times, watch)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[Measured]]] = {
    "throughput": lambda args: measure_throughput(args.flags, args.rounds, args.requests),
    "first_token": lambda args: measure_first_token(args.flags, args.rounds, args.requests),
    "large_files": lambda args: measure_large_files(args.flags, args.lines),
}


def short_requests(count: int, seed: int) -> list[OfferedRequest]:
    cut = workloads.cut_by_words(TOKENS_PER_WORD)
    return workloads.sharegpt(count, 40, 1.0, 160, 0.6, True, cut, seed)


def _long_requests(count: int, seed: int) -> list[OfferedRequest]:
    """They run for longer than a measurement."""
    return [replace(request, max_tokens=1000) for request in short_requests(count, seed)]


def _more_requests(count: int, seed: int) -> list[OfferedRequest]:
    """Short ones, which make room for others, for longer than a measurement."""
    return short_requests(8 * count, seed)


async def ask_live(base_url: str, requests: Sequence[OfferedRequest], cache_salt: str) -> float:
    """Seconds from the first request to the last answer."""
    options = ClientOptions(base_url, None, _TIMEOUT_S, False, {"cache_salt": cache_salt})
    async with open_client(options) as client:
        results = await client.offer(requests, "default", None)
    for result in results:
        if result.error is not None:
            raise ServerError(result.error)
    return max(result.finished_s for result in results)


async def ask_batch(base_url: str, requests: Sequence[OfferedRequest], cache_salt: str) -> float:
    """Seconds from the upload until the batch is completed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input.jsonl"
        write_requests(path, requests, "default", cache_salt)
        async with open_batch_client(base_url) as client:
            began_s = time.perf_counter()
            batch_id = await client.create(await client.upload(path))
            batch = await client.wait(batch_id, "completed")
            seconds = time.perf_counter() - began_s
    num_tokens = batch["usage"]["output_tokens"]
    if num_tokens != sum(request.max_tokens for request in requests):
        raise ServerError(f"the batch has {num_tokens} output tokens: not comparable")
    return seconds


async def _warm_up(base_url: str) -> None:
    """One chat request, since the server reads the chat template in the background, and one short batch."""
    [request] = short_requests(1, 0)
    chat = workloads.as_chat(request)
    async with open_client(ClientOptions(base_url, None, _TIMEOUT_S, False, {})) as client:
        await client.offer([chat], "default", None)
    await ask_batch(base_url, [request], "warm-up")


async def _run_large(base_url: str, path: Path, num_lines: int) -> dict[str, tuple[float, float]]:
    """When each phase began and ended, by time.monotonic()."""
    times: dict[str, tuple[float, float]] = {}
    async with open_batch_client(base_url) as client:
        began_s = time.monotonic()

        def note(phase: str) -> None:
            nonlocal began_s
            times[phase] = began_s, time.monotonic()
            began_s = time.monotonic()

        file_id = await client.upload(path)
        note("upload")
        batch_id = await client.create(file_id)
        await client.wait(batch_id, "in_progress")
        note("validation")
        await asyncio.sleep(RUN_S)
        batch = await client.read(batch_id)
        note(f"lines run, {batch['request_counts']['completed']:,} completed")
        await client.cancel(batch_id)
        batch = await client.wait(batch_id, "cancelled")
        note("cancelling")
        await _check_results(client, batch, num_lines)
    return times


async def _check_results(client: BatchClient, batch: dict[str, Any], num_lines: int) -> None:
    ids = [batch.get(name) for name in ("output_file_id", "error_file_id")]
    found = sum([await client.num_lines(file_id) for file_id in ids if file_id is not None])
    if found != num_lines:
        raise ServerError(f"{found} results of {num_lines} lines")


def large_rows(name: str, times: dict[str, tuple[float, float]], watch: ServerWatch) -> list[Measured]:
    """Targets are those of the validation. While lines run, the engine takes all cores."""
    rows = []
    for phase, (began_s, ended_s) in times.items():
        has_targets = phase == "validation"
        seconds, health_s = ended_s - began_s, watch.health_s(began_s, ended_s)
        target = f"at most {MAX_VALIDATION_S:g} s" if has_targets else ""
        passed = seconds <= MAX_VALIDATION_S if has_targets else None
        rows.append(Measured(f"{name}: {phase}", f"{seconds:.2f} s", target, passed))
        if health_s:
            longest_s = max(health_s)
            late = sum(one > MAX_HEALTH_S for one in health_s)
            rows.append(
                Measured(
                    f"{name}: {phase}: longest of {len(health_s)} /health",
                    f"{1000 * longest_s:.0f} ms ({late} later than 50 ms)",
                    f"at most {1000 * MAX_HEALTH_S:.0f} ms" if has_targets else "",
                    longest_s <= MAX_HEALTH_S if has_targets else None,
                )
            )
    growth = watch.growth_bytes
    rows.append(
        Measured(
            f"{name}: peak memory of the server, growth",
            f"{growth / 1e6:.0f} MB",
            f"at most {MAX_GROWTH_BYTES / 1e6:.0f} MB",
            growth <= MAX_GROWTH_BYTES,
        )
    )
    rows.append(Measured(f"{name}: peak memory of its largest child process", f"{watch.children_bytes / 1e6:.0f} MB"))
    return rows


def print_rows(rows: Sequence[Measured], console: Console) -> None:
    table = Table()
    for column in ("what", "measured", "target", "met"):
        table.add_column(column)
    for row in rows:
        met = "" if row.passed is None else "yes" if row.passed else "NO"
        table.add_row(row.what, row.value, row.target, met)
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a target was missed or a server failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batches", description="Durable batches against live requests, and large input files."
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("flags", nargs="*", metavar="NAME=VALUE", help="flags of the server")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="of each load (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=NUM_LINES, metavar="N", help="of a large file (default: 50,000)")
    args = parser.parse_intermixed_args(argv)
    try:
        rows = PARTS[args.part](args)
    except ServerError as error:
        print_error(error)
        return 1
    print_rows(rows, make_console(140))
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
