"""Steps with prompts keep to the time limit, on a worker whose steps take a time that the engine has to learn."""

import random

import numpy as np
import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.planning.step_budget import StepLimit
from tokasaurus.manager.planning.step_times import step_features
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits

LIMIT_S = 0.25
LAWS = {
    "a slow core": (0.02, 2e-3, 1e-6, 2e-3, 2e-7),
    "costly attention": (0.01, 1e-3, 1e-6, 5e-4, 2e-6),
    "slow steps": (0.05, 1e-4, 0.0, 1e-3, 0.0),
}
"""Seconds for each feature of a step."""


class TimedDriver(EngineDriver):
    """Reports for each step the time that a law gives it, with 10 % of noise."""

    law: np.ndarray
    times: list[tuple[int, float]]
    """(decode rows, seconds) of each step with prompt tokens."""

    def step(self, messages=(), num_results=0):
        if num_results and self.queue:
            self.step_seconds = (self._seconds(self.queue[0]) * self.rng.uniform(0.9, 1.1),)
        return super().step(messages, min(1, num_results))

    def _seconds(self, message: ForwardInput) -> float:
        contexts = []
        for slot, num_tokens in zip(message.slots.tolist(), message.num_tokens.tolist(), strict=True):
            known = self.worker.slots.get(slot)
            start = 0 if known is None or slot in opened(message) else known.position
            contexts.append(start + num_tokens)
        features = step_features(message.num_tokens, np.array(contexts, np.int64), message.num_decode)
        seconds = float(self.law @ features)
        if len(message.prompt_ids):
            self.times.append((message.num_decode, seconds))
        return seconds


def opened(message: ForwardInput) -> set[int]:
    return set() if message.changes.opened is None else set(message.changes.opened.slots.tolist())


def make_driver(law: str, limit: StepLimit, num_microbatches: int = 1) -> TimedDriver:
    options = make_options(
        limits=EngineLimits(4000, 16, 64_000, seconds_per_token=LAWS[law][3] * 2),
        max_tokens_per_forward=8192,
        max_seqs_per_forward=64,
        step_limit=limit,
        num_microbatches=num_microbatches,
        deferred_tasks="always",
    )
    driver = TimedDriver(options, rng=random.Random(0))
    driver.law, driver.times = np.array(LAWS[law]), []
    return driver


def burst(first: int, num_prompts: int, num_tokens: int) -> list[GenerateRequest]:
    return [
        make_request(first + number, num_tokens, max_new_tokens=4, ignore_eos=True) for number in range(num_prompts)
    ]


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(16, 1000), (4, 8000)])
@pytest.mark.parametrize("law", LAWS)
def test_a_burst_of_prompts_beside_decoding_sequences_keeps_to_the_limit(law, num_prompts, num_tokens):
    driver = make_driver(law, StepLimit(LIMIT_S, LIMIT_S))
    driver.step([make_request(number, 20, max_new_tokens=500, ignore_eos=True) for number in range(4)])
    for number in range(40):
        driver.step([], 1)
        if number == 20:
            driver.step(burst(10, 1, 600))  # the first prompts of any length, from which times are learned
    driver.times.clear()
    driver.step(burst(20, num_prompts, num_tokens))
    driver.run_until_idle()
    times = [seconds for num_decode, seconds in driver.times if num_decode]
    assert max(times) < 2 * LIMIT_S
    assert np.mean(times[2:-2]) > 0.7 * LIMIT_S, "steps as long as allowed: shorter ones would cost throughput"
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_the_steps_of_a_round_keep_to_the_limit_together(num_microbatches: int) -> None:
    """The last of several pipeline stages computes a step of each microbatch in turn."""
    driver = make_driver("a slow core", StepLimit(LIMIT_S, LIMIT_S), num_microbatches)
    driver.step([make_request(number, 20, max_new_tokens=500, ignore_eos=True) for number in range(6)])
    for number in range(40):
        driver.step([], 1)
        if number == 20:
            driver.step(burst(10, 6, 300))
    driver.times.clear()
    driver.step(burst(20, 12, 1000))
    driver.run_until_idle()
    times = [seconds for num_decode, seconds in driver.times if num_decode]
    rounds = [sum(times[first : first + num_microbatches]) for first in range(len(times) - num_microbatches + 1)]
    assert max(rounds) < 1.8 * LIMIT_S
    assert np.median(rounds) > 0.6 * LIMIT_S


def test_the_very_first_prompts_keep_to_the_limit_by_the_time_of_the_warm_up():
    driver = make_driver("a slow core", StepLimit(LIMIT_S, LIMIT_S))
    driver.step(burst(0, 4, 8000))
    driver.run_until_idle()
    assert max(seconds for _, seconds in driver.times) < 2 * LIMIT_S


def test_prompts_advance_beside_rows_that_take_longer_than_the_limit():
    driver = make_driver("slow steps", StepLimit(0.04, 0.04))
    driver.step([make_request(number, 20, max_new_tokens=300, ignore_eos=True) for number in range(4)])
    for _ in range(30):
        driver.step([], 1)
    driver.times.clear()
    driver.step(burst(20, 4, 500))
    driver.run_until_idle()
    assert 0.06 < max(seconds for _, seconds in driver.times) < 0.12


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_shorter_limit_applies_while_a_sequence_is_streamed(is_streamed):
    driver = make_driver("a slow core", StepLimit(4.0, LIMIT_S))
    request = make_request(0, 20, max_new_tokens=400, ignore_eos=True)
    driver.step([GenerateRequest(**{**fields(request), "is_streamed": is_streamed})])
    for _ in range(20):
        driver.step([], 1)
    driver.step(burst(10, 1, 600))
    for _ in range(20):
        driver.step([], 1)
    driver.times.clear()
    driver.step(burst(20, 8, 1000))
    driver.run_until_idle()
    longest = max(seconds for _, seconds in driver.times)
    assert longest < 2 * LIMIT_S if is_streamed else 2.0 < longest < 6.0


def test_streamed_prompts_that_no_stream_waits_for_are_computed_in_long_steps():
    """Short steps would compute one user's prompt in twice the time where each step reads the weights for seconds."""
    driver = make_driver("a slow core", StepLimit(4.0, LIMIT_S))
    driver.step(burst(0, 1, 600))
    driver.run_until_idle()
    driver.times.clear()
    prompts = burst(10, 3, 4000)
    driver.step([GenerateRequest(**{**fields(request), "is_streamed": True}) for request in prompts])
    driver.run_until_idle()
    alone = [seconds for num_decode, seconds in driver.times if not num_decode]
    assert 2.0 < max(alone) < 6.0
    beside = [seconds for num_decode, seconds in driver.times if num_decode]
    assert beside
    assert max(beside) < 2 * LIMIT_S


def fields(request: GenerateRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in GenerateRequest.__slots__}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_forecast_expects_prompts_to_take_as_many_steps_as_they_do(num_microbatches):
    driver = make_driver("a slow core", StepLimit(LIMIT_S, LIMIT_S), num_microbatches)
    driver.step([make_request(number, 20, max_new_tokens=3000, ignore_eos=True) for number in range(4)])
    for _ in range(40):
        driver.step([], 1)
    driver.step(burst(10, 1, 600))
    for _ in range(30):
        driver.step([], 1)
    driver.step(burst(20, 12, 1000))
    expected = forecast_kv(driver.state, None).prefill.start_steps[-1]
    sent = driver.state.next_step_id
    while driver.state.queues.prefilling:
        driver.step([], 1)
    num_rounds = (driver.state.next_step_id - sent) / num_microbatches
    assert num_rounds == pytest.approx(expected, rel=0.15)
    assert expected > 50
