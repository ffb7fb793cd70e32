"""What the store of batches costs: validating an input file, recording results, writing the output file.

`python -m benchmarks.batches.store --help`. Needs no server: it calls the server's own code on a new data directory.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import make_console
from tokasaurus.config import ServerConfig
from tokasaurus.server.jobs.closing import close_batch
from tokasaurus.server.jobs.runner import ResultRecorder
from tokasaurus.server.jobs.service import fill_ledger
from tokasaurus.server.jobs.store.data_dir import DataDir
from tokasaurus.server.jobs.store.records import BatchRecord, LineResult, add_batch, begin_finalizing, start_batch
from tokasaurus.server.jobs.store.store import Store, open_store

Result = TypeVar("Result")

INPUT_FILE = "file-input"
ENDPOINT = "/v1/completions"
NUM_IN_FLIGHT = 2048
"""Lines whose results arrive at the same time, as from a full engine."""
TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part of a batch's life costs."""

    part: str
    num_lines: int
    wall_s: float
    cpu_s: float
    """CPU time of this process: its event loop and the store's threads."""
    longest_stall_ms: float
    """Longest time for which the event loop served nobody else."""
    memory_mb: float
    """Growth of this process's peak memory."""

    @property
    def us_per_line(self) -> float:
        """CPU microseconds of this process."""
        return 1e6 * self.cpu_s / self.num_lines


def write_input(data_dir: DataDir, num_lines: int, num_bytes: int) -> None:
    """An input file of so many lines, and of about so many bytes."""
    text = "The quick brown fox jumps over the lazy dog. "
    prompt = (text * (num_bytes // num_lines // len(text) + 1))[: max(1, num_bytes // num_lines - 170)]
    content = data_dir.new_content(INPUT_FILE)
    for number in range(num_lines):
        body = {"model": "default", "prompt": prompt, "max_tokens": 64, "temperature": 0.7}
        line = {"custom_id": f"request-{number:08}", "method": "POST", "url": ENDPOINT, "body": body}
        content.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    content.commit()


def new_batch() -> BatchRecord:
    now = int(time.time())
    return BatchRecord(0, "batch_1", ENDPOINT, INPUT_FILE, "24h", now + 86_400, now, "validating")


async def measure(part: str, num_lines: int, work: Coroutine[Any, Any, Result]) -> tuple[Cost, Result]:
    """(what the work costs, its result)"""
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            longest_s = max(longest_s, time.perf_counter() - before - TICK_S)

    ticking = asyncio.create_task(tick())
    memory_before = _peak_mb(resource.RUSAGE_SELF)
    started, cpu_before = time.perf_counter(), time.process_time()
    result = await work
    cost = Cost(
        part,
        num_lines,
        time.perf_counter() - started,
        time.process_time() - cpu_before,
        1000 * longest_s,
        _peak_mb(resource.RUSAGE_SELF) - memory_before,
    )
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return cost, result


async def record_all(store: Store, number: int, num_lines: int, num_bytes: int) -> None:
    """A result of `num_bytes` for each line of the batch, in order."""
    recorder = ResultRecorder(store.database)
    running = asyncio.create_task(recorder.run())
    content = b"x" * (num_bytes - 1) + b"\n"
    lines = iter(range(num_lines))

    async def record_some() -> None:
        for line in lines:
            await recorder.store(number, LineResult(line, False, content, 10, 5, 20))

    tasks = []
    for _ in range(NUM_IN_FLIGHT):
        tasks.append(asyncio.create_task(record_some()))
        await asyncio.sleep(0)  # as the runner does: else their start would be the longest stall
    await asyncio.gather(*tasks)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def measure_all(store: Store, num_lines: int, result_bytes: int) -> list[Cost]:
    """The life of one batch."""
    batch = await store.database.write(lambda connection: add_batch(connection, new_batch()))
    config = ServerConfig()
    config.max_batch_lines = num_lines
    validation, (num_found, errors) = await measure("validate", num_lines, fill_ledger(store, batch, config))
    assert (num_found, errors) == (num_lines, []), errors

    def start(connection: apsw.Connection) -> BatchRecord:
        return start_batch(connection, batch.number, num_lines, int(time.time()))

    def finalize(connection: apsw.Connection) -> BatchRecord:
        return begin_finalizing(connection, batch.number, "completed", int(time.time()))

    await store.database.write(start)
    recording, _ = await measure("record", num_lines, record_all(store, batch.number, num_lines, result_bytes))
    batch = await store.database.write(finalize)
    assert batch.num_completed == num_lines
    closing, batch = await measure("finalize", num_lines, close_batch(store, batch, 86_400, int(time.time())))
    assert batch.output_file_id is not None
    assert store.data_dir.content_path(batch.output_file_id).stat().st_size == num_lines * result_bytes
    return [validation, recording, closing]


def print_costs(costs: Sequence[Cost], console: Console) -> None:
    """The child's memory is its peak."""
    table = Table(title="Costs of the store of batches", title_justify="left")
    columns = ("part", "lines", "wall, s", "CPU, s", "CPU, µs/line", "longest stall, ms", "memory, MB")
    for column in columns:
        table.add_column(column, justify="left" if column == "part" else "right")
    for cost in costs:
        times = (f"{cost.wall_s:.2f}", f"{cost.cpu_s:.2f}", f"{cost.us_per_line:.1f}", f"{cost.longest_stall_ms:.1f}")
        table.add_row(cost.part, str(cost.num_lines), *times, f"{cost.memory_mb:+.1f}")
    console.print(table)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = children.ru_utime + children.ru_stime
    console.print(f"process that reads the file: CPU {cpu_s:.2f} s, memory {_peak_mb(resource.RUSAGE_CHILDREN):.1f} MB")


def _peak_mb(who: int) -> float:
    """Peak memory of this process or of its largest child."""
    per_mb = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(who).ru_maxrss / per_mb


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batches.store",
        description="Validate an input file, record a result for each of its lines, and write the output file.",
    )
    parser.add_argument("--lines", type=int, default=50_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--file-mb", type=float, default=200.0, metavar="MB", help="input file; default: %(default)s")
    parser.add_argument("--result-bytes", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--directory", metavar="DIR", help="parent of the data directory; default: a temporary one")
    args = parser.parse_args(argv)
    if args.lines < 1 or args.file_mb <= 0 or args.result_bytes < 1:
        parser.error("--lines, --file-mb and --result-bytes must be positive")
    with tempfile.TemporaryDirectory(dir=args.directory) as root, open_store(Path(root), "a benchmark") as store:
        write_input(store.data_dir, args.lines, int(args.file_mb * 1e6))
        costs = asyncio.run(measure_all(store, args.lines, args.result_bytes))
    print_costs(costs, make_console(120))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
