"""Bodies of many requests, which are submitted and cancelled in parts: nothing is lost in between."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.server.helpers.client_driver import make_request
from tests.server.helpers.fake_engine import FakeEngine, hand_over, never
from tokasaurus.messages.channel import send_connection
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.engine_client.client import MAX_AT_ONCE, EngineClient
from tokasaurus.server.engine_client.limits import NO_LIMITS, QueueLimits, UnfinishedWork
from tokasaurus.server.errors import QueueFull

COUNT = 4 * MAX_AT_ONCE + 7


def body(name: str, count: int = COUNT) -> list[GenerateRequest]:
    return [make_request(f"{name}-{number}", [number % 50 + 1]) for number in range(count)]


def run(
    engine: FakeEngine,
    use: Callable[[EngineClient], Awaitable[None]],
    limits: QueueLimits = NO_LIMITS,
) -> None:
    async def main() -> None:
        ready = asyncio.Event()
        client = EngineClient(hand_over(engine), 1, ready.set, queue_limits=limits)
        with client.listening():
            engine.start()
            await asyncio.wait_for(ready.wait(), 60)
            await asyncio.wait_for(use(client), 90)
            while client.num_pending_requests:  # noqa: ASYNC110 - the client signals no event for this
                await asyncio.sleep(0.005)
            assert client._work == UnfinishedWork(limits)
            assert client._replicas[0].num_unfinished_sequences == 0

    try:
        asyncio.run(asyncio.wait_for(main(), 180))
    finally:
        engine.stop()


@pytest.mark.parametrize("num_turns", [0, 1, 3, 40])
def test_a_caller_cancelled_again_during_the_clean_up_leaves_nothing(num_turns: int) -> None:
    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate(body("a")))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for _ in range(5):
            call.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(call, return_exceptions=True)
        while client.num_pending_requests:  # noqa: ASYNC110 - the client signals no event for this
            await asyncio.sleep(0.005)
        await client.generate([make_request("last", [1])])  # arrives after all others
        requests = [request.request_id for request in engine.requests if request.request_id != "last"]
        assert sorted(engine.cancelled) == sorted(requests)
        assert len(requests) == min(num_turns * MAX_AT_ONCE, COUNT)

    echo = FakeEngine().script
    engine = FakeEngine(script=lambda request, index: echo(request, index) if request.request_id == "last" else None)
    run(engine, use)


def test_every_request_of_a_large_body_is_answered() -> None:
    async def use(client: EngineClient) -> None:
        results = await client.generate(body("a"))
        assert [row[0].token_ids for row in results] == [[number % 50 + 1] for number in range(COUNT)]

    run(FakeEngine(), use)


def test_two_bodies_at_once_are_counted_before_they_are_submitted() -> None:
    engine = FakeEngine(script=never)

    async def use(client: EngineClient) -> None:
        first = asyncio.create_task(client.generate(body("a")))
        await asyncio.sleep(0)
        assert len(client._pending) == MAX_AT_ONCE, "the first body is still being submitted"
        with pytest.raises(QueueFull):
            await client.generate(body("b"))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(engine, use, QueueLimits(max_queued_sequences=2 * COUNT - 1))


def test_every_request_of_a_large_body_outlives_the_death_of_the_engine() -> None:
    engine = FakeEngine(script=never)

    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate(body("a")))
        await asyncio.to_thread(engine.wait_until, lambda engine: len(engine.requests) == COUNT)
        engine.die()
        second = FakeEngine()
        assert engine.launcher_end is not None
        send_connection(engine.launcher_end, 0, second.connection)  # the client may not have handled the death yet
        second.start()
        results = await call
        assert [row[0].token_ids for row in results] == [[number % 50 + 1] for number in range(COUNT)]
        assert len(second.requests) == COUNT, "each is submitted once"
        second.stop()

    run(engine, use)
