"""Streams go on while a burst of prompts is computed."""

import asyncio
import time

import aiohttp
import pytest

from tests.end_to_end.helpers.toka_process import running_toka

LIMIT_S = 0.2
NUM_PROMPTS, PROMPT_TOKENS = 5, 800


async def read_stream(session: aiohttp.ClientSession, url: str, arrivals: list[float]) -> None:
    body = {"model": "default", "prompt": "Once upon", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            arrivals += [time.perf_counter()] * line.startswith(b"data:")


async def burst_beside_stream(url: str) -> tuple[list[float], float, float]:
    """Arrivals of the stream's chunks, and when the burst began and ended."""
    arrivals: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        reader = asyncio.create_task(read_stream(session, url, arrivals))
        while len(arrivals) < 5:
            assert not reader.done()
            await asyncio.sleep(0.02)
        began_s = time.perf_counter()
        prompts = [
            [1000 + number * 7 + index % 3000 for index in range(PROMPT_TOKENS)] for number in range(NUM_PROMPTS)
        ]
        bodies = [{"model": "default", "prompt": prompt, "max_tokens": 1} for prompt in prompts]
        answers = await asyncio.gather(*(session.post(f"{url}/v1/completions", json=body) for body in bodies))
        assert [answer.status for answer in answers] == [200] * NUM_PROMPTS
        ended_s = time.perf_counter()
        assert not reader.done()
        reader.cancel()
    return arrivals, began_s, ended_s


@pytest.mark.long
def test_a_stream_gets_a_token_in_every_step_of_limited_time_beside_a_burst() -> None:
    """Without the limit, the burst is one step, in which the stream gets one token. Counted in tokens, not as the
    longest gap: other processes of the machine may stop this one for any time."""
    with running_toka("kv_cache_num_tokens=20000", f"max_step_seconds={LIMIT_S}") as toka:
        arrivals, began_s, ended_s = asyncio.run(burst_beside_stream(toka.url))
        assert toka.stop() == 0
    num_during = sum(began_s < arrival < ended_s for arrival in arrivals)
    assert num_during >= (ended_s - began_s) / (3 * LIMIT_S)
    assert num_during >= 4
