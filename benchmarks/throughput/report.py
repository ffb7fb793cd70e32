"""The result of a run: totals and latency percentiles, written as JSON and printed as a table."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import write_json
from benchmarks.throughput.client import RequestResult


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of one run. Tokens, requests_per_s and latencies count only requests that succeeded."""

    num_requests: int
    num_failed: int
    wall_s: float
    """Seconds from sending the first request to the end of the last answer, failures included."""
    prompt_tokens: int
    """As the server counts them: once for a request with n samples."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache, as far as the server reports them."""
    completion_tokens: int
    output_tokens_per_s: float
    """Completion tokens per second of `wall_s`."""
    total_tokens_per_s: float
    """Prompt and completion tokens per second of `wall_s`."""
    requests_per_s: float
    latency_mean_s: float | None
    """Latency of whole requests; this and the following are None if no request succeeded."""
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """One run, as it is written to the JSON file."""

    config: dict[str, object]
    """All arguments of the command except the API key."""
    started_at: str
    """UTC time in ISO 8601."""
    machine: dict[str, object]
    """Facts of the client's machine: see `machine_facts`."""
    server: dict[str, object]
    """Model, and the answer of /version."""
    summary: Summary
    client_cpu_s: float
    """CPU seconds of this process during the measurement."""
    requests: list[RequestResult]

    def write(self, path: Path) -> None:
        write_json(path, self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the two nearest ranks, numpy's default. `values` is not empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(results: Sequence[RequestResult]) -> Summary:
    """Totals and percentiles of a run. `results` is not empty."""
    succeeded = [result for result in results if result.error is None]
    latencies = [result.latency_s for result in succeeded]
    wall_s = max(result.finished_s for result in results) - min(result.sent_s for result in results)
    prompt_tokens = sum(result.prompt_tokens for result in succeeded)
    completion_tokens = sum(result.completion_tokens for result in succeeded)
    return Summary(
        num_requests=len(results),
        num_failed=len(results) - len(succeeded),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(result.cached_tokens for result in succeeded),
        completion_tokens=completion_tokens,
        output_tokens_per_s=completion_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + completion_tokens) / wall_s,
        requests_per_s=len(succeeded) / wall_s,
        latency_mean_s=math.fsum(latencies) / len(latencies) if latencies else None,
        latency_p50_s=percentile(latencies, 50) if latencies else None,
        latency_p90_s=percentile(latencies, 90) if latencies else None,
        latency_p99_s=percentile(latencies, 99) if latencies else None,
        latency_max_s=max(latencies) if latencies else None,
    )


def print_summary(title: str, summary: Summary, console: Console) -> None:
    console.print(title, markup=False, highlight=False, soft_wrap=True)  # a table would wrap its title at its own width
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows: dict[str, float | None] = {
        "output tokens/s": summary.output_tokens_per_s,
        "total tokens/s": summary.total_tokens_per_s,
        "requests/s": summary.requests_per_s,
        "wall time, s": summary.wall_s,
        "latency p50, s": summary.latency_p50_s,
        "latency p90, s": summary.latency_p90_s,
        "latency p99, s": summary.latency_p99_s,
    }
    for name, value in rows.items():
        table.add_row(name, "-" if value is None else f"{value:,.2f}")
    counts = {
        "prompt tokens": summary.prompt_tokens,
        "of which cached": summary.cached_tokens,
        "output tokens": summary.completion_tokens,
        "requests": summary.num_requests,
        "failed": summary.num_failed,
    }
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    console.print(table)


def print_failures(results: Sequence[RequestResult], console: Console, max_lines: int = 8) -> None:
    """Print each kind of failure with its count, the most frequent first."""
    kinds = Counter(result.error for result in results if result.error is not None)
    for error, count in kinds.most_common(max_lines):
        console.print(f"failed ({count} requests): {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if len(kinds) > max_lines:
        console.print(f"and {len(kinds) - max_lines} other kinds of failure", style="red")
