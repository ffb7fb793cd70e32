"""How the client of the engine counts requests that do not simply end."""

import asyncio
from dataclasses import replace

import pytest

from tests.end_to_end.helpers.toka_process import wait_for
from tests.server.helpers.client_driver import make_request, run_with, until
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never, start_again
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.collectors import SequenceAborted


def finished(client: EngineClient, replica: str = "0") -> dict[str, int]:
    """Ends by reason, without those of which there are none."""
    return {str(reason): number for reason, number in client.request_metrics[replica].finished.items() if number}


def num_requests(client: EngineClient, replica: str = "0") -> int:
    return client.request_metrics[replica].num_samples.cumulative()[-1]


def test_other_samples_of_a_failed_request_count_as_failed(engine: FakeEngine) -> None:
    failed = Reply([], [], "stop", error="NaN", error_code="numerical_error")
    engine.script = lambda _request, index: failed if index == 1 else None

    async def use(client: EngineClient) -> None:
        with pytest.raises(SequenceAborted):
            await client.generate([make_request("a", [1, 2], 4)])
        assert finished(client) == {"error": 4}
        assert num_requests(client) == 1
        assert client.request_metrics["0"].request.cumulative()[-1] == 0

    run_with([engine], use)


def test_cancelled_requests_count_once_wherever_they_were(engine: FakeEngine) -> None:
    engine.script = lambda request, index: echo(request, index) if index == 0 else None

    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate([make_request(str(number), [1], 3) for number in range(2)]))
        await until(engine, lambda engine: len(engine.requests) == 2)
        await asyncio.to_thread(wait_for, lambda: finished(client) == {"length": 2}, 60)
        call.cancel()
        await asyncio.wait([call])
        assert finished(client) == {"length": 2, "cancelled": 4}
        await client.control.pause("keep")
        call = asyncio.create_task(client.generate([make_request("waits", [1], 2)]))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        assert finished(client, "") == {"cancelled": 2}
        assert (num_requests(client), num_requests(client, "")) == (2, 1)
        await client.control.resume()

    run_with([engine], use)


def test_requests_count_for_the_replica_that_they_ran_on() -> None:
    engines = [FakeEngine(), FakeEngine()]

    async def use(client: EngineClient) -> None:
        await asyncio.gather(*(client.generate([make_request(str(number), [number])]) for number in range(6)))
        for index, engine in enumerate(engines):
            assert finished(client, str(index)) == {"length": len(engine.requests)}

    run_with(engines, use)


def test_a_request_that_runs_again_is_one_request(engine: FakeEngine) -> None:
    engine.script = never
    engines = [engine]

    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate([replace(make_request("a", [1], 2), arrived_s=0.5)]))
        await until(engine, lambda engine: len(engine.requests) == 1)
        await asyncio.to_thread(engine.die)
        engine.script = echo
        engines.append(start_again(engine))
        await call
        assert finished(client) == {"length": 2}
        assert num_requests(client) == 1
        assert client.request_metrics["0"].request.sum > 0

    run_with(engines, use)
