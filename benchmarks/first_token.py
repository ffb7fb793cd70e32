"""Time to first token of live requests beside a load: a batch, or the same requests sent live."""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from benchmarks.batch_client import open_batch_client, write_requests
from benchmarks.client import ClientOptions, ServerError, open_client
from benchmarks.workloads import OfferedRequest

LOADS = ("live", "batch")
NUM_PROBES = 20
PROBES_PER_S = 1.0
"""Poisson arrivals."""
SETTLE_S = 8.0
"""From the start of a load until the first probe: the load's prompts are computed meanwhile."""
_WORDS_PER_PROMPT = 40
_TIMEOUT_S = 600.0


async def first_token_times(
    base_url: str, load: str, requests: Sequence[OfferedRequest], num_at_once: int, seed: int
) -> list[float]:
    """Seconds until the first token of each of NUM_PROBES live requests, beside a load.

    load: of LOADS. num_at_once: live requests of the load in flight; a batch decides that itself. Raises
    ServerError."""
    running = _live_load(base_url, requests, num_at_once, seed) if load == "live" else _batch(base_url, requests, seed)
    rng = random.Random(f"{load} {seed}")
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with running, aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.sleep(SETTLE_S)
        probes = []
        for number in range(NUM_PROBES):
            words = " ".join(str(rng.randrange(1000)) for _ in range(_WORDS_PER_PROMPT))
            probes.append(asyncio.create_task(_probe(session, base_url, f"Probe {number}: {words}")))
            await asyncio.sleep(rng.expovariate(PROBES_PER_S))
        return list(await asyncio.gather(*probes))


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
