"""The measurements of one server on a GPU: workloads over HTTP, and the time of decode steps."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.server.target import read_counters
from tokasaurus.commands.bench.client import ClientOptions, ServerError, open_client
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.measure import measure, requests_of
from tokasaurus.commands.bench.workloads import OfferedRequest

PROMPT = "What does a dinosaur eat?"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each part asks for."""

    questions: int
    samples: int
    """Of each question."""
    max_tokens: int
    """Of each sample."""
    requests: int
    """Of sharegpt."""
    mean_tokens: int
    """Of prompts and of outputs of sharegpt, in tokens."""
    num_rows: tuple[int, ...]
    """Sequences that decode together in each measurement of steps."""
    num_steps: int
    """Decode steps of each of them."""
    group_rows: tuple[int, ...]
    """Sequences of each measurement of prefix groups."""
    profile_rows: tuple[int, ...]
    """Sequences of each profile of decode steps."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a part has measured so far, kept as it grows: whatever ends a part leaves it."""

    values: dict[str, Any]
    keep: Callable[[], None]
    """Writes the values to where they stay."""

    def add(self, **values: Any) -> None:
        self.values.update(values)
        self.keep()

    def add_row(self, name: str, row: dict[str, Any]) -> None:
        """To the list of this name."""
        self.values.setdefault(name, []).append(row)
        self.keep()


async def measure_monkeys(base_url: str, sizes: Sizes, _directory: Path, measured: Measured) -> None:
    """Many samples of few questions behind one long prefix. Raises ServerError."""
    flags = [f"questions={sizes.questions}", f"samples={sizes.samples}", f"max_tokens={sizes.max_tokens}"]
    measured.add(**await _measure_workload(base_url, flags))


async def measure_top_p(base_url: str, sizes: Sizes, _directory: Path, measured: Measured) -> None:
    """As monkeys, with a limit on what may be drawn. Raises ServerError."""
    flags = [f"questions={sizes.questions}", f"samples={sizes.samples}", f"max_tokens={sizes.max_tokens}"]
    measured.add(**await _measure_workload(base_url, [*flags, 'extra_body={"top_p": 0.9}']))


async def measure_groups(base_url: str, sizes: Sizes, _directory: Path, measured: Measured) -> None:
    """As monkeys, for different numbers of sequences. Raises ServerError."""
    for num_rows in sizes.group_rows:
        num_samples = min(sizes.samples, num_rows)
        flags = [f"questions={num_rows // num_samples}", f"samples={num_samples}", f"max_tokens={sizes.max_tokens}"]
        measured.add_row("groups", {"num_rows": num_rows, **await _measure_workload(base_url, flags)})


async def measure_sharegpt(base_url: str, sizes: Sizes, directory: Path, measured: Measured) -> None:
    """Unrelated requests, all at once. directory: the model's. Raises ServerError."""
    flags = ["workload=sharegpt", "stream=F", f"requests={sizes.requests}", "concurrency=0"]
    lengths = [f"mean_tokens={sizes.mean_tokens}", f"cap={4 * sizes.mean_tokens}", f"tokenizer={directory}"]
    measured.add(**await _measure_workload(base_url, [*flags, *lengths]))


async def measure_steps(base_url: str, sizes: Sizes, _directory: Path, measured: Measured) -> None:
    """Seconds of a decode step, and the part of the time in which the device waited for one. Raises ServerError."""
    options = ClientOptions(base_url, None, 600.0, usage_per_choice=False, extra_body={})
    async with open_client(options) as client:
        for num_rows in sizes.num_rows:
            request = OfferedRequest({"prompt": PROMPT}, num_rows, sizes.num_steps, 0.6, ignore_eos=True)
            before = await read_metrics(base_url)
            started_s = time.perf_counter()
            [result] = await client.offer([request], "default", None)
            wall_s = time.perf_counter() - started_s
            if result.error is not None:
                raise ServerError(result.error)
            after = await read_metrics(base_url)
            busy_s, idle_s = (
                after[name] - before[name] for name in ("toka_forward_seconds_total", "toka_device_idle_seconds_total")
            )
            row = {
                "num_rows": num_rows,
                "step_ms": 1000 * busy_s / sizes.num_steps,
                "wall_ms": 1000 * wall_s / sizes.num_steps,
                "idle_share": idle_s / wall_s,
            }
            measured.add_row("steps", row)


async def read_metrics(base_url: str) -> dict[str, float]:
    """This server's counters by name, summed over replicas and phases. Raises ServerError."""
    values: dict[str, float] = {}
    for (name, _), value in (await asyncio.to_thread(read_counters, base_url)).items():
        if name.startswith("toka_"):
            values[name] = values.get(name, 0.0) + value
    return values


async def _measure_workload(base_url: str, flags: Sequence[str]) -> dict[str, Any]:
    """flags: of `toka bench`."""
    config = BenchConfig.parse(flags)
    before = await read_metrics(base_url)
    report = await measure(config, requests_of(config, config.seed), "server", base_url, None, config.seed)
    after = await read_metrics(base_url)
    if report.summary.num_failed:
        error = next(result.error for result in report.requests if result.error is not None)
        raise ServerError(f"{report.summary.num_failed} requests failed: {error}")
    changed = {name: value - before.get(name, 0.0) for name, value in after.items() if name.endswith("_total")}
    return {"summary": asdict(report.summary), "client_cpu_s": report.client_cpu_s, "metrics": changed}


def run_part(name: str, base_url: str, sizes: Sizes, directory: Path, timeout_s: float, measured: Measured) -> None:
    """Adds the part's measurements. Raises ServerError, also after `timeout_s` seconds."""
    try:
        asyncio.run(asyncio.wait_for(PARTS[name](base_url, sizes, directory, measured), timeout_s))
    except asyncio.TimeoutError:
        raise ServerError(f"it was not finished after {timeout_s:.0f} s") from None


PARTS = {
    "steps": measure_steps,
    "monkeys": measure_monkeys,
    "groups": measure_groups,
    "top_p": measure_top_p,
    "sharegpt": measure_sharegpt,
}
