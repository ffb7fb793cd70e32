"""The simulation against a plain loop over one real manager, and what must hold whatever dies."""

import random
import time
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale.clock import VirtualClock
from benchmarks.scale.load import PlannedRequest, Shape, plan
from benchmarks.scale.replica import Device, make_options
from benchmarks.scale.simulation import Deaths, RollingUpdate, Run, Simulation, choose_least_busy
from benchmarks.scale.step_times import StepTimes, fit
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.state.engine_state import EngineOptions, make_state
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.client import MAX_REPLAYS

TIMES = StepTimes(0.004, 3e-5, 1e-7, 2e-5, 1e-9, "of the test")
SHAPE = Shape(24, 3, 4, 64, (5, 40), (3, 30))


def small_options(num_blocks: int = 300) -> EngineOptions:
    return make_options(EngineLimits(num_blocks, 16, 512, seconds_per_step=0.004), 12, 128)


def tokens(run: Run) -> list[tuple[int, int, int]]:
    return [(answer.request.session, answer.request.turn, answer.num_tokens) for answer in run.answers]


def step_by_step(
    sessions: list[list[PlannedRequest]], options: EngineOptions
) -> tuple[list[ForwardInput], dict[str, float]]:
    """One manager and one device in a plain loop: its steps, and when each request ends.

    Without events, queues or routing: the device computes the oldest step, and the manager learns of its end."""
    clock = VirtualClock()
    with clock.in_place_of_monotonic():
        state = make_state(options)
        waiting: deque[ForwardInput] = deque()
        seconds: deque[float] = deque()
        steps: list[ForwardInput] = []
        ends: dict[str, float] = {}

        def send(message: ForwardInput) -> None:
            waiting.append(message)
            steps.append(message)
            seconds.append(TIMES.seconds(state.steps_in_flight[-1].features))

        engine, device = Engine(state, send), Device(options.num_slots)
        engine.step([session[0].engine_request() for session in sessions], [])
        while waiting:
            clock.now_s += seconds[0]
            engine.step([], [device.forward(waiting.popleft(), seconds.popleft())])
            deltas, state.deltas = state.deltas, []
            following: list[GenerateRequest] = []
            for delta in deltas:
                ends[delta.request_id] = clock.now_s
                session, turn = map(int, delta.request_id.split("-"))
                if turn + 1 < len(sessions[session]):
                    following.append(sessions[session][turn + 1].engine_request())
            if following:
                engine.step(following, [])
    return steps, ends


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [60, 300])
def test_one_replica_is_the_managers_own_loop(seed: int, num_blocks: int) -> None:
    """With 60 blocks, sequences wait for memory."""
    sessions, options = plan(SHAPE, seed), small_options(num_blocks)
    steps, ends = step_by_step(sessions, options)
    run = Simulation(sessions, 1, options, TIMES).run()
    assert run.num_steps == len(steps)
    found = {f"{answer.request.session}-{answer.request.turn}": answer.ended_s for answer in run.answers}
    assert found == pytest.approx(ends)
    assert run.busy_s == pytest.approx(run.ended_s)  # its device was never idle


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_tokens_are_conserved(num_replicas: int) -> None:
    sessions = plan(SHAPE, 5)
    simulation = Simulation(sessions, num_replicas, small_options(), TIMES)
    run = simulation.run()
    asked = {(one.session, one.turn): one.answer_tokens for session in sessions for one in session}
    assert {(session, turn): num for session, turn, num in tokens(run)} == asked
    assert sum(run.tokens_of_replicas) == sum(asked.values())
    computed = sum(replica.state.totals.prompt_tokens for replica in simulation.replicas)
    assert computed == sum(len(one.prompt_ids) for session in sessions for one in session)
    for answer in run.answers:
        assert 0 <= answer.num_cached_tokens < len(answer.request.prompt_ids)
        assert answer.num_runs == answer.num_ends == 1


@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_exactly_once_whatever_dies(seed: int) -> None:
    rng = random.Random(seed)
    num_replicas = rng.randint(1, 6)
    deaths = Deaths(rng.uniform(0.1, 0.8), rng.randint(1, num_replicas), rng.uniform(0.01, 2.0))
    sessions = plan(SHAPE, seed)
    run = Simulation(sessions, num_replicas, small_options(), TIMES, deaths=deaths).run()
    assert run.died_s is not None
    names = Counter((answer.request.session, answer.request.turn) for answer in run.answers)
    assert names == Counter((one.session, one.turn) for session in sessions for one in session)
    assert {answer.num_ends for answer in run.answers} == {1}
    assert not any(answer.has_failed for answer in run.answers)
    again = [answer for answer in run.answers if answer.num_runs == 2]
    assert again
    assert all(answer.sent_s <= run.died_s < answer.ended_s for answer in again)
    assert max(answer.num_runs for answer in run.answers) <= 1 + MAX_REPLAYS
    assert all(answer.num_tokens == answer.request.answer_tokens for answer in run.answers)


@pytest.mark.parametrize(("num_replicas", "group_size"), [(1, 1), (4, 1), (6, 4)])
def test_a_rolling_update_starts_every_replica_again_and_runs_no_request_again(
    num_replicas: int, group_size: int
) -> None:
    simulation = Simulation(
        plan(SHAPE, 2), num_replicas, small_options(), TIMES, update=RollingUpdate(0.2, group_size, 0.5)
    )
    run = simulation.run()
    assert [replica.num_lives for replica in simulation.replicas] == [2] * num_replicas
    assert {answer.num_runs for answer in run.answers} == {answer.num_ends for answer in run.answers} == {1}
    assert run.updated_s is not None
    assert run.updated_s[1] - run.updated_s[0] >= 0.5 * -(-num_replicas // group_size)


def test_routing_by_prefix_finds_more_cached_than_by_load() -> None:
    shape = replace(SHAPE, sessions=48, prefixes=24, prefix_tokens=128)
    sessions = plan(shape, 3)

    def cached(run: Run) -> int:
        return sum(answer.num_cached_tokens for answer in run.answers)

    by_prefix = Simulation(sessions, 4, small_options(100), TIMES).run()
    by_load = Simulation(sessions, 4, small_options(100), TIMES, choose_least_busy).run()
    assert cached(by_prefix) > 1.1 * cached(by_load)


def test_the_clock_stands_still_but_for_the_simulation_and_is_given_back() -> None:
    real = time.monotonic
    clock = VirtualClock()
    with clock.in_place_of_monotonic():
        assert time.monotonic() == time.monotonic() == 0.0
        clock.now_s = 5.0
        assert time.monotonic() == 5.0
    assert time.monotonic is real


def test_a_fit_finds_the_weights_of_noisy_steps() -> None:
    rng = np.random.default_rng(1)
    rows, prefill = rng.integers(1, 17, 400), rng.integers(0, 2, 400) * rng.integers(1, 512, 400)
    features = np.stack([np.ones(400), rows, rows * rng.integers(50, 400, 400), prefill, prefill * 200], axis=1)
    true = StepTimes(0.02, 1e-3, 2e-6, 3e-4, 1e-7, "")
    exact = np.array([true.seconds(row) for row in features.astype(np.float64)])
    noisy = exact * rng.normal(1.0, 0.05, 400)
    found = fit(features.tolist(), noisy.tolist(), "")
    predicted = np.array([found.seconds(row) for row in features.astype(np.float64)])
    assert predicted.sum() == pytest.approx(noisy.sum(), rel=1e-3)
    assert np.abs(predicted / exact - 1).max() < 0.1
    assert found.per_step == pytest.approx(true.per_step, rel=0.1)
