"""What a run comes to: totals, rates and percentiles. Times of streams are defined as in `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokasaurus.commands.bench.client import RequestResult
from tokasaurus.commands.bench.config import PERCENTILES

_FULL = 0.9
"""The load counts as full from this share of the most requests in flight on."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread, in seconds."""

    mean: float
    std: float
    percentiles: dict[str, float]
    """"p50", "p90", "p95" and "p99"."""
    max: float


@dataclass(frozen=True, slots=True)
class FullLoad:
    """The middle of a run, without its beginning and its end, in which few requests are in flight."""

    seconds: float
    """Seconds from the first to the last moment at which the load is full: 90 % of the most requests that are ever in
    flight."""
    output_tokens_per_s: float
    """Streamed tokens count when they come; tokens of whole answers are spread evenly over the request."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of one run. Tokens, requests_per_s and times count only requests that succeeded."""

    num_requests: int
    num_failed: int
    wall_s: float
    """Seconds from sending the first request to the end of the last answer, failures included."""
    prompt_tokens: int
    """Prompt tokens by the server's count: a prompt with n samples counts once."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache, as far as the server reports them."""
    completion_tokens: int
    output_tokens_per_s: float
    """Completion tokens per second of `wall_s`."""
    total_tokens_per_s: float
    """Prompt and completion tokens per second of `wall_s`."""
    requests_per_s: float
    full_load: FullLoad | None
    """None if no request succeeded."""
    goodput_per_s: float | None
    """Requests per second that kept to all limits; None without limits."""
    cost_per_million_tokens: float | None
    """Cost of a million output tokens by the price of an hour; None without a price, or without tokens."""
    e2el_s: Spread | None
    """Time from sending a request to its last token, or to the end of the answer if it is not streamed."""
    e2el_from_arrival_s: Spread | None
    """Time from when a request was due to its end, with its wait for a connection; None without arrival times."""
    ttft_s: Spread | None
    """Time from sending to the first token; this and the next two are None without streams."""
    tpot_s: Spread | None
    """Time per token after a request's first token; with n samples, after the first token of each."""
    itl_s: Spread | None
    """Time between two events with tokens of one sample."""


def spread_of(values: Sequence[float]) -> Spread | None:
    """None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    cuts = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return Spread(mean, std, {f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}, ordered[-1])


def time_per_token_s(result: RequestResult) -> float | None:
    """Seconds per token after the first of each sample; None for an answer of one token, or that was not streamed."""
    num_after = result.completion_tokens / result.num_samples - 1
    if result.first_token_s is None or num_after <= 0:
        return None
    return (result.latency_s - result.first_token_s) / num_after


def summarize(
    results: Sequence[RequestResult],
    goodput_ms: Mapping[str, float] | None = None,
    price_per_hour: float | None = None,
) -> Summary:
    """Totals and percentiles of a run. `results` is not empty.

    goodput_ms: limits by "ttft", "tpot" and "e2el"; a request of one token
    keeps to any limit of tpot."""
    succeeded = [result for result in results if result.error is None]
    wall_s = max(result.finished_s for result in results) - min(result.sent_s for result in results)
    prompt_tokens = sum(result.prompt_tokens for result in succeeded)
    completion_tokens = sum(result.completion_tokens for result in succeeded)
    tpots = {result.index: time_per_token_s(result) for result in succeeded}
    limits_s = {name: limit / 1000 for name, limit in (goodput_ms or {}).items()}

    def is_good(result: RequestResult) -> bool:
        times = {"ttft": result.first_token_s, "tpot": tpots[result.index], "e2el": result.latency_s}
        return all((times[name] or 0.0) <= limit_s for name, limit_s in limits_s.items())

    hours = wall_s / 3600
    has_cost = price_per_hour is not None and completion_tokens
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
        full_load=full_load(succeeded),
        goodput_per_s=sum(map(is_good, succeeded)) / wall_s if goodput_ms else None,
        cost_per_million_tokens=(price_per_hour or 0.0) * hours / completion_tokens * 1e6 if has_cost else None,
        e2el_s=spread_of([result.latency_s for result in succeeded]),
        e2el_from_arrival_s=spread_of(
            [result.latency_s + result.waited_s for result in succeeded if result.waited_s is not None]
        ),
        ttft_s=spread_of([result.first_token_s for result in succeeded if result.first_token_s is not None]),
        tpot_s=spread_of([value for value in tpots.values() if value is not None]),
        itl_s=spread_of([gap for result in succeeded for gap in result.gaps_s]),
    )


def full_load(results: Sequence[RequestResult]) -> FullLoad | None:
    """None if there are no results."""
    changes = sorted([(result.finished_s, -1) for result in results] + [(result.sent_s, 1) for result in results])
    counts, num_in_flight = [], 0
    for time_s, change in changes:
        num_in_flight += change
        counts.append((time_s, num_in_flight))
    if not counts:
        return None
    most = max(count for _, count in counts)
    full = [index for index, (_, count) in enumerate(counts) if count >= _FULL * most]
    # It is full until the change after the last moment at which it is.
    began_s, ended_s = counts[full[0]][0], counts[full[-1] + 1][0]
    seconds = ended_s - began_s
    if seconds <= 0:
        return None
    tokens = sum(tokens_within(result, began_s, ended_s) for result in results)
    return FullLoad(seconds, tokens / seconds)


def tokens_within(result: RequestResult, began_s: float, ended_s: float) -> float:
    """Tokens that came between two times of the run."""
    if result.first_token_s is None:
        share = (min(ended_s, result.finished_s) - max(began_s, result.sent_s)) / (result.finished_s - result.sent_s)
        return max(0.0, share) * result.completion_tokens
    num_within = sum(began_s <= result.sent_s + event_s <= ended_s for event_s in result.events_s)
    return result.completion_tokens * num_within / len(result.events_s)


def rows(summary: Summary) -> list[tuple[str, Callable[[Any], str], float | None]]:
    """(name, how it is shown, value) of each line of a table of a run."""

    def rate(value: float) -> str:
        return f"{value:,.2f}"

    def count(value: float) -> str:
        return f"{value:,.0f}"

    full = summary.full_load
    lines: list[tuple[str, Callable[[Any], str], float | None]] = [
        ("output tokens/s", rate, summary.output_tokens_per_s),
        ("… at full load", rate, None if full is None else full.output_tokens_per_s),
        ("total tokens/s", rate, summary.total_tokens_per_s),
        ("requests/s", rate, summary.requests_per_s),
    ]
    if summary.goodput_per_s is not None:
        lines.append(("good requests/s", rate, summary.goodput_per_s))
    if summary.cost_per_million_tokens is not None:
        lines.append(("cost of 1M output tokens", rate, summary.cost_per_million_tokens))
    lines.append(("wall time, s", rate, summary.wall_s))
    lines += [
        ("prompt tokens", count, summary.prompt_tokens),
        ("… found cached", count, summary.cached_tokens),
        ("output tokens", count, summary.completion_tokens),
        ("requests", count, summary.num_requests),
        ("… failed", count, summary.num_failed),
    ]
    return lines


TIMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2el_s": "end to end",
    "e2el_from_arrival_s": "… from arrival",
}
"""Field of Summary: its name in tables."""
