"""Metrics of the server, read while a load runs: how full the KV cache gets, preemptions, cached and idle shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Names:
    """What one server calls its metrics. Sums over all labels."""

    kv_used: str
    """A gauge: of `kv_total`, or a fraction if that is empty."""
    kv_total: str
    preemptions: str
    cached: str
    asked: str
    """Counters of prompt tokens: found cached, of all."""
    idle_s: str = ""


_SERVERS = (
    _Names(
        "toka_kv_blocks_used",
        "toka_kv_blocks",
        "toka_preemptions_total",
        "toka_prefix_cache_hit_tokens_total",
        "toka_asked_prompt_tokens_total",
        "toka_device_idle_seconds_total",
    ),
    _Names(
        "vllm:kv_cache_usage_perc",
        "",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    ),
    _Names(
        "sglang:token_usage",
        "",
        "sglang:num_retracted_reqs_total",
        "sglang:cached_tokens_total",
        "sglang:prompt_tokens_total",
    ),
)
_ALL_NAMES = {
    name
    for names in _SERVERS
    for name in (names.kv_used, names.kv_total, names.preemptions, names.cached, names.asked, names.idle_s)
    if name
}


@dataclass(slots=True)
class ServerFigures:
    """Figures of one load by the server's own metrics; None for each that it does not report."""

    kv_peak: float | None = None
    """Largest share of the KV cache in use, from 0 to 1, read once a second."""
    preemptions: float | None = None
    cached_share: float | None = None
    """Share of the asked prompt tokens that was found cached."""
    idle_share: float | None = None
    """Share of the time in which the device waited though sequences were left to compute."""


@dataclass(slots=True)
class Scrape:
    """Filled while `watched` runs."""

    samples: list[dict[str, float]] = field(default_factory=list)

    def figures(self, wall_s: float) -> ServerFigures:
        for names in _SERVERS:
            if self.samples and names.kv_used in self.samples[0]:
                return self._figures(names, wall_s)
        return ServerFigures()

    def _figures(self, names: _Names, wall_s: float) -> ServerFigures:
        first, last = self.samples[0], self.samples[-1]

        def grown(name: str) -> float | None:
            return last[name] - first[name] if name in first and name in last else None

        replicas = max(1.0, first.get("replicas", 1.0))
        used = [
            one[names.kv_used] / (one[names.kv_total] if names.kv_total else replicas)
            for one in self.samples
            if names.kv_used in one and (not names.kv_total or one.get(names.kv_total))
        ]
        cached, asked, idle_s = grown(names.cached), grown(names.asked), grown(names.idle_s)
        return ServerFigures(
            kv_peak=max(used, default=None),
            preemptions=grown(names.preemptions),
            cached_share=cached / asked if cached is not None and asked else None,
            idle_share=None if idle_s is None else idle_s / (wall_s * replicas),
        )


@asynccontextmanager
async def watched(session: aiohttp.ClientSession, base_url: str) -> AsyncIterator[Scrape]:
    """Reads the server's /metrics before, during and after the context. A server without them gives no samples."""
    url = f"{base_url.rpartition('/')[0]}/metrics"
    scrape = Scrape()

    async def read() -> bool:
        with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
            async with session.get(url, timeout=aiohttp.ClientTimeout(30)) as response:
                if response.ok and (sample := _sample(await response.text())):
                    scrape.samples.append(sample)
                    return True
        return False

    async def read_on() -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await read()

    if not await read():
        yield scrape
        return
    reader = asyncio.create_task(read_on())
    try:
        yield scrape
    finally:
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        await read()


def _sample(text: str) -> dict[str, float]:
    """The known metrics of a page in Prometheus' text format, summed over labels, and the number of "replicas"."""
    values: dict[str, float] = {}
    lines = "\n".join(_wanted(text)) + "\n"
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name in {names.kv_used for names in _SERVERS}:
                values["replicas"] = values.get("replicas", 0.0) + 1
    return values


def _wanted(text: str) -> Iterator[str]:
    """The lines of known metrics: a page has many others."""
    for line in text.splitlines():
        if not line.startswith("#") and line.partition(" ")[0].partition("{")[0] in _ALL_NAMES:
            yield line
