"""Pipeline stages under the real engine, in simulated time: the slowest is busy, and nobody waits for long."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.examples import IS_NIGHTLY, few
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.pipeline import SECONDS_OF_STEP, SECONDS_OF_TOKEN, Pipeline, at_once, spread
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine import engine as engine_module
from tokasaurus.manager.engine.microbatches import choose_microbatch
from tokasaurus.messages.generation import GenerateRequest

EQUAL, UNEQUAL = [1.0, 1.0, 1.0, 1.0], [1.0, 1.2, 0.8, 1.0]
NUM_SLOTS = 4 * (64 if IS_NIGHTLY else 16)


def long_requests(prompt_tokens: list[int], seed: int, num_samples: int = 1) -> list[GenerateRequest]:
    """Of random lengths, known to the engine; they end at any time. prompt_tokens: of each. num_samples: of each."""
    rng = random.Random(seed)
    return [
        make_request(index, count, num_samples, rng.randint(40, 160), ignore_eos=True)
        for index, count in enumerate(prompt_tokens)
    ]


def steady(pipeline: Pipeline) -> tuple[float, float]:
    """From the moment when a tenth of all sequences have ended, until no more wait for a slot: half have ended."""
    ends = sorted(now_s for now_s, delta in pipeline.deltas if delta.finish_reason is not None)
    return ends[len(ends) // 10], ends[len(ends) // 2]


SHORT_PROMPTS = [4] * (2 * NUM_SLOTS)
HEAVY_START = [300] * NUM_SLOTS + [4] * NUM_SLOTS
LONG_PROMPTS = [300] * (2 * NUM_SLOTS)


@few(
    1,
    ("prompt_tokens", "factors", "least"),
    [
        (SHORT_PROMPTS, EQUAL, 0.95),
        (HEAVY_START, UNEQUAL, 0.95),
        # Three quarters of all tokens are of prompts, which end in chunks of any size.
        pytest.param(LONG_PROMPTS, EQUAL, 0.9, marks=pytest.mark.long),
        pytest.param(SHORT_PROMPTS, UNEQUAL, 0.95, marks=pytest.mark.long),
        pytest.param(HEAVY_START, EQUAL, 0.95, marks=pytest.mark.long),
        pytest.param(LONG_PROMPTS, UNEQUAL, 0.9, marks=pytest.mark.long),
    ],
)
def test_the_slowest_of_four_stages_is_busy(prompt_tokens: list[int], factors: list[float], least: float) -> None:
    pipeline = Pipeline(factors, num_microbatches=5, num_slots=NUM_SLOTS)
    pipeline.run(at_once(long_requests(prompt_tokens, seed=1)))
    assert pipeline.busy_share(*steady(pipeline)) >= least


@few(1, ("num_microbatches", "is_busy"), [(5, True), (4, False)])
def test_one_more_microbatch_than_stages_covers_the_managers_delay(num_microbatches: int, is_busy: bool) -> None:
    """The manager and the queues take as long as half a step, here. With as many as stages, every step waits."""
    pipeline = Pipeline(EQUAL, num_microbatches=num_microbatches, num_slots=NUM_SLOTS, delay_s=SECONDS_OF_STEP)
    pipeline.run(at_once(long_requests(SHORT_PROMPTS, seed=1)))
    assert (pipeline.busy_share(*steady(pipeline)) >= 0.95) == is_busy


@pytest.mark.parametrize("factors", [UNEQUAL, pytest.param(EQUAL, marks=pytest.mark.long)])
@pytest.mark.long
def test_the_time_left_is_until_the_first_stage_needs_a_step(
    factors: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until the last stage is done, three steps later. The step that waits may do so before the first stage, or
    before a slower one, and delays nothing in either case: so the estimate may be one step longer."""
    pipeline = Pipeline(factors, num_microbatches=5, num_slots=NUM_SLOTS)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: pipeline.now_s))
    step, looks = pipeline.engine.step, list[tuple[float, float, float]]()

    def look(*arguments: Any) -> None:
        step(*arguments)
        looks.append((pipeline.now_s, pipeline.engine.seconds_left(), pipeline.first_stage_busy_s()))

    monkeypatch.setattr(pipeline.engine, "step", look)
    pipeline.run(at_once(long_requests(SHORT_PROMPTS, seed=1)))
    start_s, end_s = steady(pipeline)
    errors = [found - busy for now_s, found, busy in looks if start_s <= now_s <= end_s]
    seconds_of_step = (SECONDS_OF_STEP + SECONDS_OF_TOKEN * NUM_SLOTS / 5) * max(factors)
    assert len(errors) > 100
    assert np.quantile(errors, 0.05) / seconds_of_step > -0.25
    assert np.quantile(errors, 0.95) / seconds_of_step < 1.5


def test_fewer_sequences_than_stages_leave_time_until_the_next_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are idle then, but no step could be sent earlier: to defer a task would gain nothing."""
    pipeline = Pipeline(EQUAL, num_microbatches=5, num_slots=NUM_SLOTS)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: pipeline.now_s))
    pipeline.run(at_once(long_requests([4], seed=1)))
    pipeline.engine.step(long_requests([4], seed=2), [])
    assert len(pipeline.state.steps_in_flight) == 2
    assert pipeline.engine.seconds_left() > 0


@pytest.mark.parametrize("scheduling_steps_ahead", [1, 2, 8])
def test_a_microbatch_has_at_most_two_steps_in_flight_and_no_more_than_steps_ahead(scheduling_steps_ahead: int) -> None:
    options = make_options(100, scheduling_steps_ahead=scheduling_steps_ahead, num_microbatches=5, pp_size=4)
    driver = EngineDriver(options)
    driver.step([make_request(1, 5, 1, 60, ignore_eos=True)])
    driver.run_until_idle()
    assert driver.max_in_flight == min(2, scheduling_steps_ahead)


@few(1, ("num_requests", "num_samples"), [(16, 16), (1, NUM_SLOTS)])
def test_samples_of_few_prompts_keep_the_slowest_stage_busy(num_requests: int, num_samples: int) -> None:
    """Also if all belong to one request: from a tenth of the time until the first of them ends, all are decoding."""
    pipeline = Pipeline(UNEQUAL, num_microbatches=5, num_slots=NUM_SLOTS)
    pipeline.run(at_once(long_requests([200] * num_requests, seed=1, num_samples=num_samples)))
    first_end_s = min(now_s for now_s, delta in pipeline.deltas if delta.finish_reason is not None)
    assert pipeline.busy_share(0.1 * first_end_s, first_end_s) >= 0.95


def test_one_request_with_many_samples_is_in_all_microbatches() -> None:
    """Although all of them are fewer than a fifth of the slots."""
    pipeline = Pipeline(EQUAL, num_microbatches=5, num_slots=1000)
    pipeline.engine.step([make_request(1, 40, 60, 30, ignore_eos=True)], [])
    slots = pipeline.state.slots
    assert np.bincount(slots.microbatches[slots.is_running], minlength=5).tolist() == [12] * 5


def test_samples_are_in_all_microbatches_if_the_kv_cache_holds_few_of_them() -> None:
    """Most of the 200 samples wait: those that run are spread evenly."""
    options = make_options(900, max_seqs_per_forward=1000, max_tokens_per_forward=1000, num_microbatches=5, pp_size=4)
    driver = EngineDriver(options)
    driver.step([make_request(1, 40, 200, 30, ignore_eos=True)])
    slots = driver.state.slots
    counts = np.bincount(slots.microbatches[slots.is_running], minlength=5)
    assert 40 < counts.sum() < 200
    assert counts.max() - counts.min() <= 2


def test_a_single_microbatch_keeps_one_stage_busy_at_a_time() -> None:
    """Without microbatches, four stages work in turns: what this design is for."""
    pipeline = Pipeline(EQUAL, num_microbatches=1, num_slots=NUM_SLOTS)
    pipeline.run(at_once(long_requests(SHORT_PROMPTS, seed=1)))
    assert pipeline.busy_share(*steady(pipeline)) < 0.35


@few(
    1,
    ("factors", "num_prompt_tokens", "per_second", "num_rounds"),
    [
        (EQUAL, 20, 20.0, 1),
        (UNEQUAL, 300, 2.0, 6),
        pytest.param(UNEQUAL, 20, 20.0, 1, marks=pytest.mark.long),
        pytest.param(EQUAL, 300, 2.0, 6, marks=pytest.mark.long),
    ],
)
def test_new_requests_wait_at_most_one_round(
    factors: list[float], num_prompt_tokens: int, per_second: float, num_rounds: int
) -> None:
    """There are slots for all. When a request comes, each microbatch has at most one step that was sent before.

    num_rounds: until the step that samples the first token, at 64 prompt tokens a round or more.
    """
    pipeline = Pipeline(factors, num_microbatches=5, num_slots=2 * NUM_SLOTS)
    num_new = 200 if IS_NIGHTLY else 40
    requests = long_requests([4] * NUM_SLOTS + [num_prompt_tokens] * num_new, seed=2)
    before, new = requests[:NUM_SLOTS], requests[NUM_SLOTS:]
    # Those before have begun to decode: 5 seconds are some 50 rounds.
    arrivals = [(5 + arrived_s, request) for arrived_s, request in spread(new, per_second, seed=3)]
    pipeline.run(itertools.chain(at_once(before), arrivals))
    for arrived_s, request in arrivals:
        sent_before = int(np.searchsorted(pipeline.sent_s, arrived_s))
        assert pipeline.first_steps[request.seed] - sent_before < 5
        assert pipeline.first_token_steps[request.seed] - sent_before < 5 * num_rounds


def test_samples_of_a_prompt_stay_together_unless_that_would_fill_more_than_a_share() -> None:
    pipeline = Pipeline(EQUAL, num_microbatches=5, num_slots=50)
    few = [make_request(number, 40, 4, 30, ignore_eos=True) for number in range(5)]
    state = pipeline.state
    pipeline.engine.step(few, [])
    microbatches = {
        request.request_id: {
            int(state.slots.microbatches[sequence.slot]) for sequence in state.unfinished[request.request_id].sequences
        }
        for request in few
    }
    assert all(len(own) == 1 for own in microbatches.values())
    assert set.union(*microbatches.values()) == {0, 1, 2, 3, 4}
    pipeline = Pipeline(EQUAL, num_microbatches=5, num_slots=50)
    pipeline.engine.step([make_request(9, 40, 50, 30, ignore_eos=True)], [])
    state = pipeline.state
    assert np.bincount(state.slots.microbatches[state.slots.is_running]).tolist() == [10, 10, 10, 10, 10]


def test_microbatches_stay_balanced_while_sequences_end_at_random() -> None:
    """No microbatch has more than a sixteenth of the sequences more than its share, once all slots are used."""
    pipeline = Pipeline(EQUAL, num_microbatches=5, num_slots=NUM_SLOTS)
    largest = []
    admit = pipeline.engine.step

    def step(*arguments: object) -> None:
        admit(*arguments)
        slots = pipeline.state.slots
        if pipeline.state.slots.num_running > NUM_SLOTS * 0.9:
            largest.append(np.bincount(slots.microbatches[slots.is_running], minlength=5).max())

    pipeline.engine.step = step
    pipeline.run(at_once(long_requests(SHORT_PROMPTS, seed=5)))
    assert len(largest) > 100
    assert max(largest) <= NUM_SLOTS / 5 + NUM_SLOTS / 16


def test_one_microbatch_is_all_there_is_without_stages() -> None:
    pipeline = Pipeline([1.0], num_microbatches=1, num_slots=8)
    pipeline.engine.step([make_request(1, 5, 4)], [])
    for sequence in pipeline.state.unfinished["r1"].sequences:
        assert choose_microbatch(pipeline.state, sequence) == 0
    assert not pipeline.state.slots.microbatches.any()
