"""The table of states of EngineControl, walked with an engine that refuses to go on while it sleeps."""

import pytest

from tests.server.helpers.client_driver import run_with
from tests.server.helpers.fake_engine import FakeEngine
from tokasaurus.messages.commands import Held, Resume, Sleep, Wake
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.control import EngineControl
from tokasaurus.server.errors import Conflict

PATHS = {"running": [], "paused": ["pause"], "asleep": ["sleep"], "woken": ["sleep", "wake, stays_paused"]}
"""How each state is reached from the first."""


def documented() -> list[tuple[str, str, str]]:
    """(state, action, what follows) of the docstring's table."""
    lines = [line.strip().strip("|") for line in (EngineControl.__doc__ or "").splitlines() if line.strip()[:1] == "|"]
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [(row[0], action, cell) for row in rows for action, cell in list(zip(head, row, strict=True))[2:]]


def state_of(held: Held) -> str:
    if held.sleep is not None:
        return "asleep"
    if held.was_asleep:
        return "woken"
    return "paused" if held.is_paused else "running"


def is_asleep(engine: FakeEngine) -> bool:
    """By the last command of that kind."""
    last = [command for command in engine.commands if isinstance(command, Sleep | Wake)]
    return bool(last) and isinstance(last[-1], Sleep)


def sleepy_engine() -> FakeEngine:
    """Refuses to resume while it sleeps."""
    engine = FakeEngine()
    engine.on_command = lambda command: "it sleeps" if isinstance(command, Resume) and is_asleep(engine) else ""
    return engine


async def act(control: EngineControl, action: str) -> None:
    match action:
        case "pause":
            await control.pause("keep")
        case "resume":
            await control.resume()
        case "sleep":
            await control.sleep("keep", ["kv_cache"])
        case _:
            await control.wake(stays_paused="stays_paused" in action)


def test_the_table_names_all_states_and_actions() -> None:
    assert {state for state, _, _ in documented()} == set(PATHS)
    assert len(documented()) == 4 * 5


CASES = [(*row, was_paused) for row in documented() for was_paused in (False, True)]


@pytest.mark.parametrize(
    ("state", "action", "cell", "was_paused"), [case for case in CASES if "sleep" in PATHS[case[0]] or not case[3]]
)
def test_what_follows_in_each_state(state: str, action: str, cell: str, was_paused: bool) -> None:
    """was_paused: before it slept."""

    async def use(client: EngineClient) -> None:
        control = client.control
        for step in [*(["pause"] if was_paused else []), *PATHS[state]]:
            await act(control, step)
        before = control.held
        assert state_of(before) == state
        if cell == "refused":
            with pytest.raises(Conflict):
                await act(control, action)
            assert control.held == before
        else:
            await act(control, action)
            first, _, second = cell.partition(", or paused")
            assert state_of(control.held) == ("paused" if second and was_paused else first)
        assert control.is_asleep == is_asleep(engine)

    engine = sleepy_engine()
    run_with([engine], use)


def test_an_engine_that_sleeps_again_after_it_woke_for_weights_refuses_to_resume() -> None:
    async def use(client: EngineClient) -> None:
        for step in ("sleep", "wake, stays_paused", "sleep"):
            await act(client.control, step)
        with pytest.raises(Conflict):
            await client.control.resume()
        assert client.control.is_asleep
        assert is_asleep(engine)
        await client.control.wake()
        assert state_of(client.control.held) == "running"

    engine = sleepy_engine()
    run_with([engine], use)
