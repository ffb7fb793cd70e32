"""Runs an engine client on an event loop, as the server does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvloop

from tests.server.helpers.fake_engine import FakeEngine, hand_over
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.limits import NO_LIMITS, UnfinishedWork


def make_request(request_id: str, prompt_ids: list[int], num_sequences: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        num_sequences=num_sequences,
        max_new_tokens=100,
        sampling=SamplingParams(),
        seed=0,
        stop_strings=(),
        ignore_eos=False,
        want_logprobs=True,
    )


def run_with(engines: list[FakeEngine], use: Callable[[EngineClient], Awaitable[None]], **options: Any) -> None:
    """Runs `use(client)` on uvloop, as the server does, once all engines are up; then asserts that the client has no
    pending state. Stops the engines, also those that `use` adds. options: of the client."""
    ready = asyncio.Event()
    client = EngineClient(hand_over(*engines), len(engines), ready.set, **options)

    async def main() -> None:
        with client.listening():
            for engine in engines:
                engine.start()
            await asyncio.wait_for(ready.wait(), 60)
            await asyncio.wait_for(use(client), 60)

    try:
        uvloop.run(main())
    finally:
        for engine in engines:
            engine.stop()
    assert client.num_pending_requests == 0
    assert all(replica.num_unfinished_sequences == 0 for replica in client._replicas)
    assert client._work == UnfinishedWork(NO_LIMITS)


def run(use: Callable[[EngineClient, list[FakeEngine]], Awaitable[None]], *engines: FakeEngine) -> None:
    """As run_with; `use` is given the list that it may add to."""
    running = list(engines)
    run_with(running, lambda client: use(client, running))


async def until(engine: FakeEngine, condition: Callable[[FakeEngine], bool]) -> None:
    await asyncio.to_thread(engine.wait_until, condition)
