"""Replicas that die, or are up again, in the middle of pauses and updates: all end with the same weights, and none
waits for ever."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.helpers.client_driver import make_request, run
from tests.server.helpers.fake_engine import FakeEngine, start_again
from tokasaurus.messages.commands import CommandDone, EngineCommand, Pause, Resume, UpdateWeights
from tokasaurus.messages.generation import EngineUpdate
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.control import next_version


async def update(client: EngineClient, name: str, is_partial: bool = False) -> str:
    return await client.control.update(name, name, is_partial=is_partial, clears_cache=True)


async def until_up(client: EngineClient, count: int) -> None:
    while len(client._up) < count:  # noqa: ASYNC110 - the client signals no event for this
        await asyncio.sleep(0.005)


def directories(engine: FakeEngine) -> list[str]:
    """Names of the directories of the updates that it was given."""
    return [Path(command.directory).name for command in engine.commands if isinstance(command, UpdateWeights)]


def is_paused(engine: FakeEngine) -> bool:
    """By the last command of that kind."""
    last = [command for command in engine.commands if isinstance(command, Pause | Resume)]
    return bool(last) and isinstance(last[-1], Pause)


def test_a_replica_that_is_up_again_in_the_middle_of_an_update_gets_it_before_requests() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        first, second = engines

        def while_it_is_written(command: EngineCommand) -> str:
            if isinstance(command, UpdateWeights):
                engines.append(start_again(second, replica=1))
                loop.call_soon_threadsafe(begun.set)
                assert asyncio.run_coroutine_threadsafe(until_up(client, 2), loop).result(20) is None
            return ""

        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        second.die()
        while len(client._up) > 1:  # noqa: ASYNC110 - no event for this
            await asyncio.sleep(0.005)
        first.on_command = while_it_is_written
        assert await update(client, "new") == "new"
        assert directories(engines[2]) == ["new"]
        await client.generate([make_request("a", [1])])
        await asyncio.sleep(0.1)
        assert [is_paused(engine) for engine in (first, engines[2])] == [False, False]

    run(use, FakeEngine(), FakeEngine())


def test_a_replica_that_missed_several_updates_gets_all_that_still_hold_in_order() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        engines[1].die()
        while len(client._up) > 1:  # noqa: ASYNC110 - no event for this
            await asyncio.sleep(0.005)
        await update(client, "earlier")
        await update(client, "whole")
        await client.control.update("part 1", "v", is_partial=True, clears_cache=True)
        await client.control.update("part 2", "v", is_partial=True, clears_cache=True)
        for number, expected in ((0, ["whole", "part 1", "part 2"]), (3, ["part 2"]), (4, [])):
            engines.append(start_again(engines[1], replica=1, update_number=number))
            await until_up(client, 2)
            assert directories(engines[-1]) == expected
            await asyncio.sleep(0.1)
            assert not is_paused(engines[-1])
            engines[-1].die()
            while len(client._up) > 1:  # noqa: ASYNC110 - no event for this
                await asyncio.sleep(0.005)

    run(use, FakeEngine(), FakeEngine())


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_dies_just_after_it_has_paused_or_changed_holds_nothing_up(number: int) -> None:
    """number: of the update that it has when it is up again."""

    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        (engine,) = engines
        kind = UpdateWeights if number else Pause
        num_pauses = 0

        def die(command: EngineCommand) -> str:
            nonlocal num_pauses
            num_pauses += isinstance(command, Pause)
            if isinstance(command, kind) and num_pauses == 2:  # the second is that of the update
                # answered and gone, in one read of the client
                if not number:
                    engine.updates.send(EngineUpdate([], engine.stats, [], [CommandDone(command.command_id)]))
                engine.updates.close()
                engine._is_stopping = True
                loop.call_soon_threadsafe(loop.call_later, 0.2, restart)
            return ""

        def restart() -> None:
            engines.append(start_again(engine, update_number=number))

        loop = asyncio.get_running_loop()
        engine.on_command = die
        assert await update(client, "new") == "new"
        assert directories(engines[1]) == ([] if number else ["new"])
        await asyncio.sleep(0.1)
        assert not is_paused(engines[1])

    run(use, FakeEngine())


def test_a_replica_that_is_up_again_while_the_others_resume_is_resumed_too() -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        first, second = engines
        loop = asyncio.get_running_loop()

        def start_other(command: EngineCommand) -> str:
            if isinstance(command, Resume):
                engines.append(start_again(second, replica=1))
                asyncio.run_coroutine_threadsafe(until_up(client, 2), loop).result(20)
            return ""

        await client.control.pause("keep")
        second.die()
        while len(client._up) > 1:  # noqa: ASYNC110 - no event for this
            await asyncio.sleep(0.005)
        first.on_command = start_other
        await client.control.resume()
        assert not is_paused(engines[2])

    run(use, FakeEngine(), FakeEngine())


def test_files_that_change_after_an_update_are_not_what_was_asked_for(tmp_path: Path) -> None:
    async def use(client: EngineClient, engines: list[FakeEngine]) -> None:
        file = tmp_path / "a.safetensors"
        states = []
        for content in (b"one", b"two"):
            file.write_bytes((2).to_bytes(8, "little") + b"{}" + content)
            await update(client, str(tmp_path))
            command = [one for one in engines[0].commands if isinstance(one, UpdateWeights)][-1]
            states.append(command.files)
        assert [len(one) for one in states] == [1, 1]
        assert states[0] != states[1]

    run(use, FakeEngine())


@pytest.mark.parametrize(
    "versions",
    [
        ["0", "1"],
        ["step-8", "step-8.1", "step-8.2"],
        ["9" * 30, "9" * 30 + ".1"],
        ["\u0663", "\u0663.1"],
        ["1.9", "1.10"],
    ],
)
def test_versions_count_on_from_any_name(versions: list[str]) -> None:
    for version, following in pairwise(versions):
        assert next_version(version) == following
