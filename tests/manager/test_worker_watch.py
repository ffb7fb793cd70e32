"""A worker that hangs is told apart from a long step, an idle engine, and a stop of the manager itself."""

import numpy as np
import pytest

from tests.manager.helpers.engine_driver import make_options
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.loop import PAUSE_SECONDS, WorkerWatch
from tokasaurus.manager.state.engine_state import EngineState, make_state
from tokasaurus.messages.status import EngineLimits

WATCHDOG_S = 10.0
"""Larger than PAUSE_SECONDS, so that the watch looks several times before a step is late."""


def state_with_a_step_in_flight(
    num_prompt_tokens: int = 5, seconds_per_token: float = 0.001, pp_size: int = 1
) -> EngineState:
    limits = EngineLimits(2000, 16, 20_000, seconds_per_token=seconds_per_token)
    options = make_options(limits=limits, max_tokens_per_forward=8192, max_seqs_per_forward=16, pp_size=pp_size)
    state = make_state(options)
    engine = Engine(state, lambda _: None)
    engine.step([make_request(1, num_prompt_tokens, max_new_tokens=100, ignore_eos=True)], [])
    assert state.steps_in_flight
    return state


def first_late_s(watch: WorkerWatch, state: EngineState, until_s: float, began_s: float = 0.0) -> float | None:
    looks_s = np.arange(began_s, until_s, 1.0)
    return next((float(now_s) for now_s in looks_s if watch.is_late(state, float(now_s))), None)


def test_a_step_is_late_after_the_watchdogs_time() -> None:
    late_s = first_late_s(WorkerWatch(WATCHDOG_S, 0.0), state_with_a_step_in_flight(), 100)
    assert late_s is not None
    assert WATCHDOG_S < late_s <= WATCHDOG_S + 3


def test_a_long_prefill_has_the_time_that_it_needs() -> None:
    state = state_with_a_step_in_flight(num_prompt_tokens=8000, seconds_per_token=0.001)
    late_s = first_late_s(WorkerWatch(WATCHDOG_S, 0.0), state, 2000)
    assert late_s is not None
    assert 4 * 80 < late_s < 4 * 500


def test_a_step_has_as_much_time_for_each_stage_that_it_passes() -> None:
    late_s = [
        first_late_s(WorkerWatch(WATCHDOG_S, 0.0), state_with_a_step_in_flight(8000, pp_size=pp_size), 9000)
        for pp_size in (1, 4)
    ]
    assert None not in late_s
    assert late_s[1] == pytest.approx(4 * late_s[0], abs=4)


def test_an_idle_engine_is_never_late() -> None:
    limits = EngineLimits(20, 16, 200)
    state = make_state(make_options(limits=limits))
    assert first_late_s(WorkerWatch(WATCHDOG_S, 0.0), state, 1000) is None


def test_results_start_the_time_again() -> None:
    state, watch = state_with_a_step_in_flight(), WorkerWatch(WATCHDOG_S, 0.0)
    for result_id in range(20):
        began_s = 8.0 * result_id
        state.last_result_id = result_id
        assert first_late_s(watch, state, began_s + 8, began_s) is None
    assert first_late_s(watch, state, 400, 160) is not None


def test_a_manager_that_was_stopped_gives_the_worker_its_time_again() -> None:
    state, watch = state_with_a_step_in_flight(), WorkerWatch(WATCHDOG_S, 0.0)
    assert first_late_s(watch, state, 8) is None
    resumed_s = 8 + 100 * PAUSE_SECONDS
    late_s = first_late_s(watch, state, resumed_s + 100, resumed_s)
    assert late_s is not None
    assert late_s > resumed_s + WATCHDOG_S
