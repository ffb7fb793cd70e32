"""What becomes of requests when their engine dies: run again if nothing was sent, else ended; and not for ever."""

import asyncio
from dataclasses import replace

import pytest

from tests.server.helpers.client_driver import make_request, run, until
from tests.server.helpers.fake_engine import FakeEngine, Reply, never, start_again
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.client import MAX_REPLAYS, EngineClient
from tokasaurus.server.engine_client.collectors import StreamCollector
from tokasaurus.server.errors import EngineDied, EngineRestarting


def streamed(request_id: str, prompt_ids: list[int]) -> GenerateRequest:
    return replace(make_request(request_id, prompt_ids), is_streamed=True)


async def read_to_end(collector: StreamCollector) -> list[int]:
    """The tokens of a stream with one sequence."""
    tokens: list[int] = []
    while deltas := await collector.read():
        tokens += [token for _, delta in deltas for token in delta.token_ids]
    return tokens


async def until_restarting(client: EngineClient) -> None:
    while not client.is_restarting:  # noqa: ASYNC110 - the client signals no event for this
        await asyncio.sleep(0.005)


def test_a_whole_answer_is_run_again_with_the_same_request() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", [1, 2, 3], num_sequences=2)]))
        await until(engines[0], lambda engine: len(engine.requests) == 1)
        first = engines[0].requests[0]
        engines[0].die()
        await until_restarting(client)
        assert client.stats == [None]
        engines[0].script = FakeEngine().script
        second = start_again(engines[0])
        (sequences,) = await call
        assert [sequence.token_ids for sequence in sequences] == [[1, 2, 3]] * 2
        (again,) = second.requests
        assert (again.request_id, again.seed, again.num_sequences) == (first.request_id, first.seed, 2)
        assert client.num_restarts == [1]
        second.stop()

    run(use, FakeEngine(script=never))


def test_finished_sequences_of_a_request_are_run_again_with_the_others() -> None:
    echo = FakeEngine().script

    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", [1, 2], num_sequences=3)]))
        await until(engines[0], lambda engine: len(engine.requests) == 1)
        while client._pending["a"].num_unfinished == 3:  # noqa: ASYNC110 - no event for this
            await asyncio.sleep(0.005)
        engines[0].die()
        engines[0].script = echo
        second = start_again(engines[0])
        (sequences,) = await call
        assert [sequence.token_ids for sequence in sequences] == [[1, 2]] * 3
        second.stop()

    run(use, FakeEngine(script=lambda request, index: echo(request, index) if index == 1 else None))


def test_of_two_streams_the_one_that_was_read_ends_and_the_other_runs_again() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        read, unread = streamed("read", [1, 2, 3]), streamed("unread", [4])
        async with client.stream([read]) as begun, client.stream([unread]) as waiting:
            assert await begun.read()
            engines[0].die()
            with pytest.raises(EngineDied):
                await read_to_end(begun)
            engines[0].script = FakeEngine().script
            second = start_again(engines[0])
            assert await read_to_end(waiting) == [4]
            assert [request.request_id for request in second.requests] == ["unread"]
            second.stop()

    def begin_one(request: GenerateRequest, _index: int) -> Reply | None:
        return Reply([1, 2], [-1.0, -2.0], finish_reason=None) if request.request_id == "read" else None

    run(use, FakeEngine(script=begin_one))


def test_a_request_whose_engine_dies_each_time_is_given_an_error_in_the_end() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", [1])]))
        engine = engines[0]
        for _ in range(MAX_REPLAYS):
            await until(engine, lambda engine: len(engine.requests) == 1)
            engine.die()
            engine = start_again(engine)
        await until(engine, lambda engine: len(engine.requests) == 1)
        assert not call.done()
        engine.die()
        with pytest.raises(EngineDied):
            await call

    run(use, FakeEngine(script=never))


def test_another_replica_takes_over_at_once() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", [1, 2])]))
        await until(engines[0], lambda engine: len(engine.requests) == 1)
        engines[0].die()
        (sequences,) = await call
        assert sequences[0].token_ids == [1, 2]
        assert not client.is_restarting
        assert [len(engine.requests) for engine in engines] == [1, 1]

    run(use, FakeEngine(script=never), FakeEngine())


def test_a_request_that_no_longer_fits_after_the_restart_gets_an_error() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", list(range(100)))]))
        await until(engines[0], lambda engine: len(engine.requests) == 1)
        engines[0].die()
        second = start_again(engines[0], limits=EngineLimits(4, 16, 64))
        with pytest.raises(EngineDied, match="KV cache is smaller"):
            await call
        second.stop()

    run(use, FakeEngine(script=never))


def test_requests_during_a_restart_wait_or_are_refused() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        engines[0].die()
        await until_restarting(client)
        client.check_restart()
        client._while_restarting = "refuse"
        with pytest.raises(EngineRestarting):
            client.check_restart()
        client._while_restarting = "wait"
        call = asyncio.create_task(client.generate([make_request("a", [7])]))
        await asyncio.sleep(0.05)
        second = start_again(engines[0])
        assert (await call)[0][0].token_ids == [7]
        second.stop()

    run(use, FakeEngine())


def test_a_request_cancelled_during_a_restart_is_not_run_again() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        call = asyncio.create_task(client.generate([make_request("a", [1])]))
        await until(engines[0], lambda engine: len(engine.requests) == 1)
        engines[0].die()
        await until_restarting(client)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        second = start_again(engines[0])
        assert (await client.generate([make_request("b", [2])]))[0][0].token_ids == [2]
        assert [request.request_id for request in second.requests] == ["b"]
        second.stop()

    echo = FakeEngine().script
    engine = FakeEngine(script=lambda request, index: None if request.request_id == "a" else echo(request, index))
    run(use, engine)
