"""A server in the place of one that has died: the engine it finds may be up or not, paused, or have newer weights."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tests.server.helpers.client_driver import make_request
from tests.server.helpers.fake_engine import LIMITS, FakeEngine, hand_over, weights
from tokasaurus.messages.commands import NOTHING_HELD, Held, Pause, Resume, Sleep, StartedUpdate, UpdateWeights, Wake
from tokasaurus.messages.generation import EngineUpdate
from tokasaurus.messages.status import Predecessors
from tokasaurus.server.engine_client.client import CallCounts, EngineClient


def run(
    use: Callable[[EngineClient, list[Held]], Awaitable[None]],
    *engines: FakeEngine,
    held: Held = NOTHING_HELD,
    num_updates: int = 0,
) -> None:
    """Runs `use(client, what it has told the launcher)`. No engine is up when it begins. num_updates: that the launcher
    knows of."""
    updates = (weights(num_updates),) if num_updates else ()
    predecessors = Predecessors(2, ((LIMITS, 1),) * len(engines), updates, held, started=1_000.5)
    told: list[Held] = []

    async def main() -> None:
        client = EngineClient(hand_over(*engines), len(engines), predecessors=predecessors, tell_held=told.append)
        with client.listening():
            await asyncio.wait_for(use(client, told), 30)

    try:
        uvloop.run(main())
    finally:
        for engine in engines:
            engine.stop()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - no event for this
        await asyncio.sleep(0.005)


def given(engine: FakeEngine) -> list[str]:
    """Versions of the updates that it was given."""
    return [command.version for command in engine.commands if isinstance(command, UpdateWeights)]


def test_requests_wait_for_an_engine_that_is_not_up_yet() -> None:
    engine = FakeEngine()

    async def use(client: EngineClient, _told: list[Held]) -> None:
        assert (client.limits, client.is_restarting) == (LIMITS, True)
        assert (client.num_server_restarts, client.num_restarts) == (2, [1])
        assert client.started == 1_000.5, "so that totals of managers, which go on, are not taken for new ones"
        call = asyncio.create_task(client.generate([make_request("a", [1, 2])]))
        await asyncio.sleep(0.05)
        assert not call.done()
        engine.start()
        ((sequence,),) = await call
        assert sequence.token_ids == [1, 2]
        assert engine.commands == [], "an engine that is not paused needs no command"

    run(use, engine)


def test_it_is_ready_once_a_replica_is_up_and_takes_over_what_has_arrived_before_it_listens() -> None:
    """One of two replicas may have been given up."""
    ready: list[bool] = []
    engine = FakeEngine()
    predecessors = Predecessors(1, ((LIMITS, 0), (LIMITS, 5)))

    async def main() -> None:
        launcher = hand_over(engine)
        engine.start()
        client = EngineClient(launcher, 2, lambda: ready.append(True), predecessors=predecessors)
        await until(engine.has_told.is_set)
        with client.listening():
            assert (ready, client.is_restarting) == ([True], False)
            await client.generate([make_request("a", [1])])
        assert ready == [True]

    try:
        uvloop.run(main())
    finally:
        engine.stop()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_update_that_one_replica_finished_after_the_death_is_given_to_the_other(order: tuple[int, int]) -> None:
    engines = FakeEngine(update_number=2), FakeEngine(update_number=1)

    async def use(client: EngineClient, _told: list[Held]) -> None:
        assert client.control.weight_version == "1"
        for index in order:
            engines[index].start()
            await until(lambda index=index: client.replicas[index].limits and client.stats[index] is not None)
        await until(lambda: len(client._up) == 2 and client.control.weight_version == "2")
        assert [given(engine) for engine in engines] == [[], ["2"]]
        assert await client.control.update("new", None, is_partial=False, clears_cache=True) == "3"
        assert [given(engine) for engine in engines] == [["3"], ["2", "3"]]
        numbers = [command.number for command in engines[0].commands if isinstance(command, UpdateWeights)]
        assert numbers == [3]

    run(use, *engines, num_updates=1)


def test_an_update_waits_until_each_replica_has_told_its_weights() -> None:
    engines = FakeEngine(update_number=1), FakeEngine(update_number=2)

    async def use(client: EngineClient, _told: list[Held]) -> None:
        engines[0].start()
        await until(lambda: len(client._up) == 1)
        call = asyncio.create_task(client.control.update("new", "new", is_partial=True, clears_cache=True))
        await asyncio.sleep(0.05)
        assert engines[0].commands == []
        engines[1].start()
        assert await call == "new"
        # The first one may be given what it lacks after the call has ended, but before it gets requests.
        await until(lambda: len(given(engines[0])) > 1)
        assert [given(engine) for engine in engines] == [["2", "new"], ["new"]]

    run(use, *engines, num_updates=1)


def test_an_engine_that_a_dead_server_had_paused_for_an_update_goes_on() -> None:
    engine = FakeEngine(is_paused=True)

    async def use(client: EngineClient, _told: list[Held]) -> None:
        engine.start()
        await client.generate([make_request("a", [1])])
        assert engine.commands == [Wake(0), Resume(0)]

    run(use, engine)


def test_a_pause_and_a_sleep_hold_until_a_client_ends_them() -> None:
    told: list[Held] = []

    async def sleep(client: EngineClient, held: list[Held]) -> None:
        first.start()
        await until(lambda: client._up)
        await client.control.pause("keep")
        await client.control.sleep("keep", ("kv_cache", "weights"), refuses=True)
        told.extend(held)

    async def go_on(client: EngineClient, _told: list[Held]) -> None:
        assert client.control.held == told[-1]
        assert client.control.waits_to_resume
        second.start()
        await until(lambda: len(second.commands) == 2)
        assert second.commands == [Pause(0, aborts=False), Sleep(0, with_weights=True)]
        call = asyncio.create_task(client.generate([make_request("a", [1])]))
        await client.control.wake()
        await asyncio.sleep(0.05)
        assert not call.done(), "it was paused before it slept"
        await client.control.resume()
        await call

    first, second = FakeEngine(), FakeEngine(is_paused=True)
    run(sleep, first)
    assert told == [Held(is_paused=True), Held(True, Sleep(0, with_weights=True), False, True, True)]
    run(go_on, second, held=told[-1])


def test_weights_that_come_in_parts_go_on_and_what_one_update_needs_is_not_held(tmp_path: Path) -> None:
    told: list[Held] = []

    async def begin(client: EngineClient, held: list[Held]) -> None:
        first.start()
        await until(lambda: client._up)
        await client.control.update(str(tmp_path), "whole", is_partial=False, clears_cache=True)
        assert held[-1] == NOTHING_HELD
        rollouts = client.control
        await rollouts.start_update()
        await rollouts.update(str(tmp_path), None, is_partial=True, clears_cache=True)
        told.append(held[-1])

    async def finish(client: EngineClient, held: list[Held]) -> None:
        second.start()
        rollouts = client.control
        assert client.control.is_paused
        await until(lambda: client._up)
        assert await rollouts.update(str(tmp_path), None, is_partial=True, clears_cache=True) == "whole.1"
        await rollouts.finish_update()
        await client.generate([make_request("a", [1])])
        assert held[-1] == NOTHING_HELD

    first, second = FakeEngine(), FakeEngine(is_paused=True)
    run(begin, first)
    assert told == [Held(is_paused=True, started_update=StartedUpdate("whole.1", has_paused=True))]
    run(finish, second, held=told[-1])


def test_an_update_that_began_in_sleep_goes_on_after_each_of_its_pauses() -> None:
    engine = FakeEngine()

    async def use(client: EngineClient, told: list[Held]) -> None:
        engine.start()
        await until(lambda: client._up)
        rollouts = client.control
        await client.control.sleep("keep", ("kv_cache", "weights"), refuses=False)
        await rollouts.start_update()
        await client.control.wake()
        assert not client.control.is_paused
        await rollouts.start_update()
        assert client.control.is_paused
        assert told[-1].started_update == StartedUpdate("1", has_paused=True)
        await rollouts.finish_update()
        assert not client.control.is_paused
        assert told[-1] == NOTHING_HELD

    run(use, engine)


def test_tokens_that_an_engine_has_sampled_for_a_dead_server_are_not_counted_again() -> None:
    engine = FakeEngine()

    async def use(client: EngineClient, _told: list[Held]) -> None:
        engine.stats = replace(engine.stats, total_generation_tokens=1000)
        engine.start()
        engine.updates.send(EngineUpdate([], engine.stats))  # with which a manager greets a server
        await until(lambda: client._up)
        await client.generate([make_request("a", [1, 2, 3])])
        engine.stats = replace(engine.stats, total_generation_tokens=1010)
        engine.updates.send(EngineUpdate([], engine.stats))
        await until(lambda: client.stats[0] == engine.stats)
        calls.append(client.calls)

    calls: list[CallCounts] = []
    run(use, engine)
    assert calls[0].totals().num_generated_tokens == 10, "of calls that got none of them, too"
