"""Time to first token of live requests beside a load: a batch, or the same requests sent live."""

import asyncio
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from benchmarks.batches.client import open_batch_client, write_requests
from tokasaurus.commands.bench.client import ClientOptions, ServerError, open_client
from tokasaurus.commands.bench.workloads import OfferedRequest

LOADS = ("live", "batch")
NUM_PROBES = 20
PROBES_PER_S = 1.0
"""Poisson arrivals, at the same times beside each load."""
SETTLE_TIMEOUT_S = 120.0
"""The load must run within this, before the first probe is sent."""
_WORDS_PER_PROMPT = 40
_RUNNING = re.compile(r"^toka_requests_running\{.*\} (\S+)$", re.MULTILINE)
_TIMEOUT_S = 600.0


async def first_token_times(
    base_url: str, load: str, requests: Sequence[OfferedRequest], num_at_once: int, seed: int
) -> list[float]:
    """Seconds until the first token of each of NUM_PROBES live requests, beside a load.

    load: of LOADS. num_at_once: live requests of the load in flight; a batch decides that itself. Raises
    ServerError."""
    running = _live_load(base_url, requests, num_at_once, seed) if load == "live" else _batch(base_url, requests, seed)
    words_rng, arrivals_rng = random.Random(f"{load} {seed}"), random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with running, aiohttp.ClientSession(timeout=timeout) as session:
        await _wait_until_running(session, base_url, num_at_once)
        await _probe(session, base_url, f"Its answer comes after the prompts of the load: {load} {seed}")
        probes = []
        for number in range(NUM_PROBES):
            words = " ".join(str(words_rng.randrange(1000)) for _ in range(_WORDS_PER_PROMPT))
            probes.append(asyncio.create_task(_probe(session, base_url, f"Probe {number}: {words}")))
            await asyncio.sleep(arrivals_rng.expovariate(PROBES_PER_S))
        return list(await asyncio.gather(*probes))


async def _wait_until_running(session: aiohttp.ClientSession, base_url: str, num_requests: int) -> None:
    """Raises ServerError if fewer run after SETTLE_TIMEOUT_S: probes would wait with the others for a place."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    running = 0
    while running < num_requests:
        if time.monotonic() > deadline_s:
            raise ServerError(f"{running} of {num_requests} requests of the load run: use fewer, or a larger KV cache")
        await asyncio.sleep(0.2)
        async with session.get(f"{base_url.removesuffix('/v1')}/metrics") as answer:
            running = sum(int(float(value)) for value in _RUNNING.findall(await answer.text()))


async def _probe(session: aiohttp.ClientSession, base_url: str, prompt: str) -> float:
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    began_s = time.perf_counter()
    async with session.post(f"{base_url}/completions", json=body) as answer:
        if answer.status != 200:
            raise ServerError(f"HTTP {answer.status}: {await answer.text()}")
        await answer.content.readline()
        seconds = time.perf_counter() - began_s
        await answer.read()
    return seconds


@asynccontextmanager
async def _live_load(
    base_url: str, requests: Sequence[OfferedRequest], num_at_once: int, seed: int
) -> AsyncIterator[None]:
    options = ClientOptions(base_url, None, _TIMEOUT_S, False, {"cache_salt": f"live {seed}"})
    async with open_client(options) as client:
        load = asyncio.create_task(client.offer(requests, "default", num_at_once))
        try:
            yield
            if load.done():
                raise ServerError("the load ended before the last probe: ask for more requests")
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load


@asynccontextmanager
async def _batch(base_url: str, requests: Sequence[OfferedRequest], seed: int) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input.jsonl"
        write_requests(path, requests, "default", f"batch {seed}")
        async with open_batch_client(base_url) as client:
            batch_id = await client.create(await client.upload(path))
            await client.wait(batch_id, "in_progress")
            yield
            if (await client.read(batch_id))["status"] != "in_progress":
                raise ServerError("the batch ended before the last probe: ask for more requests")
            await client.cancel(batch_id)
            await client.wait(batch_id, "cancelled")
