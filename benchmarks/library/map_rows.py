"""`map` without a model: rows per second through reading, prompts, journal and files, and the memory it takes.

By default without a server too; `--engine` sends the rows through the real processes of an `LLM`, whose worker answers
at once with random text."""

import argparse
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.library.fast_engine import use as use_fast_worker
from benchmarks.results import at_least, at_most
from tests.library.map.helpers.instant_session import completion
from tokasaurus import LLM
from tokasaurus.library.blocking import BulkSession
from tokasaurus.library.map.job import map_rows
from tokasaurus.library.map.options import MapOptions
from tokasaurus.library.requests import Answer, RequestFormat, RequestLine
from tokasaurus.library.sampling import Sampling

MIN_ROWS_PER_S = 20_000
MAX_GROWTH_MIB = 100
MAX_TOKENS = 4
"""Of an answer of the fast worker."""
_MAX_LINES = 4096
_RESPONSE = completion({}, "The answer is 42, as you will find when you look at it closely.")


class _EmptyEngine:
    """Answers each line with the same text, in the exchange after the one that sent it."""

    def __init__(self) -> None:
        self._in_flight: Sequence[RequestLine] = ()

    def announce(self, num_lines: int | None) -> None:
        pass

    def room(self) -> int:
        return _MAX_LINES - len(self._in_flight)

    def exchange(
        self, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        del is_last, timeout_s
        answered, self._in_flight = self._in_flight, lines
        return [Answer(line, 200, _RESPONSE) for line in answered]

    def progress(self) -> None:
        return None


def write_questions(path: Path, num_rows: int) -> None:
    """A Parquet file of short questions."""
    schema = pa.schema({"id": pa.string(), "question": pa.string(), "level": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for numbers in _parts(num_rows):
            questions = [f"What is {number} plus {number % 97}? Answer with a number." for number in numbers]
            columns = [[f"row-{number}" for number in numbers], questions, [number % 5 for number in numbers]]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _parts(num_rows: int) -> Iterator[range]:
    return (range(start, min(start + 100_000, num_rows)) for start in range(0, num_rows, 100_000))


Map = Callable[..., object]


@contextmanager
def empty_engine() -> Iterator[Map]:
    """`map` over an engine that takes no time."""

    def run(rows: str, output: Path, **arguments: Any) -> None:
        session = cast(BulkSession, _EmptyEngine())
        map_rows(session, RequestFormat("m", Sampling()), rows, output, MapOptions(progress=False, **arguments))

    yield run


@contextmanager
def fast_engine() -> Iterator[Map]:
    """`map` of an LLM with the fast worker."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        use_fast_worker()
        with LLM(name, dtype="float32") as llm:
            yield partial(llm.map, sampling=Sampling(max_tokens=MAX_TOKENS), progress=True)


def write_checkpoint(directory: Path) -> None:
    """By a process of its own, for it takes torch, and the memory of this one is measured."""
    program = (
        "import sys, pathlib, tests.helpers.tiny_model as m; m.save_tiny_model(pathlib.Path(sys.argv[1]), 'llama')"
    )
    subprocess.run([sys.executable, "-c", program, directory], check=True, stderr=subprocess.DEVNULL)


def seconds_of(run: Map, rows: str, output: Path, **arguments: Any) -> float:
    """Of one call."""
    start_s = time.perf_counter()
    run(rows, output, **arguments)
    return time.perf_counter() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    parser.add_argument("--directory", type=Path, help="where files are written; by default the temporary directory")
    parser.add_argument("--engine", action="store_true", help="with server and manager, without a limit of time")
    arguments = parser.parse_args()
    with (
        fast_engine() if arguments.engine else empty_engine() as run,
        tempfile.TemporaryDirectory(dir=arguments.directory) as name,
    ):
        folder = Path(name)
        # In a process of its own, for this one's memory is measured.
        writing = multiprocessing.get_context("spawn").Process(
            target=write_questions, args=(folder / "questions.parquet", arguments.rows)
        )
        writing.start()
        writing.join()
        options = {"prompt": "{question}", "key": "id", "format": arguments.format}
        with suppress(ImportError):  # pyarrow imports it sooner or later
            import pandas  # noqa: F401
        start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start_cpu_s = time.process_time()
        seconds = seconds_of(run, str(folder / "questions.parquet"), folder / "out", **options)
        cpu_us = 1e6 * (time.process_time() - start_cpu_s) / arguments.rows
        growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib) / 1024
        again_s = seconds_of(run, str(folder / "questions.parquet"), folder / "out", **options)
    rate, again = arguments.rows / seconds, arguments.rows / again_s
    print(
        f"{arguments.rows:,} rows: {rate:,.0f} rows/s, {cpu_us:.1f} µs of CPU per row, memory grew by "
        f"{growth_mib:.0f} MiB"
    )
    print(f"the same call again, all rows done: {again:,.0f} rows/s")
    checks = [at_most("growth of memory in MiB", growth_mib, MAX_GROWTH_MIB)]
    if not arguments.engine:  # the server's share of a row is another benchmark's subject
        checks.append(at_least("rows/s", rate, MIN_ROWS_PER_S))
    for check in checks:
        if not check.is_met:
            print(f"missed: {check.name} is {check.value:,.0f}, the limit is {check.limit:,.0f}")
    return 0 if all(check.is_met for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
