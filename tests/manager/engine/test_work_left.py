"""The work that is left, against the tokens that clients have asked for and those that have come back."""

import time
from dataclasses import replace

import pytest

from tests.manager.helpers.engine_driver import QUICK_STEP_SECONDS, EngineDriver, make_options, make_quick_driver
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.work_left import engine_time_left, note_pace, oldest_wait, step_cost, work_left
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.messages.live import JobsLeft
from tokasaurus.messages.status import TimeLeft

NEW_TOKENS = 9


def test_tokens_left_are_those_asked_for_without_those_that_came_back() -> None:
    driver = EngineDriver(make_options(40, max_seqs_per_forward=3))
    requests = [
        make_request(number, 5, num_sequences=2, max_new_tokens=NEW_TOKENS, ignore_eos=True) for number in range(4)
    ]
    num_asked, num_compared = 4 * 2 * NEW_TOKENS, 0
    assert work_left(driver.state) is None, "nothing runs"
    driver.step(requests, 0)
    while driver.queue or driver.state.ending:
        left = work_left(driver.state)
        stats = driver.state.stats()
        if left is not None:
            assert left.num_tokens == num_asked - stats.total_generation_tokens
            assert 0 <= max(left.running, default=0) <= NEW_TOKENS
            assert 5 * stats.num_waiting / 2 <= left.num_prompt_tokens + 5 <= 4 * 2 * 5 + 5
            num_compared += 1
        assert (oldest_wait(driver.state, time.monotonic()) is not None) == (stats.num_waiting > 0)
        driver.step([], driver.rng.randint(0, 2))
    assert num_compared > 10
    assert driver.state.step_totals.num_finished_requests == 4


def test_the_oldest_wait_is_that_of_the_first_request_with_a_waiting_sequence() -> None:
    driver = EngineDriver(make_options(100, max_seqs_per_forward=2))
    driver.step([make_request(0, 5, num_sequences=2, max_new_tokens=NEW_TOKENS, ignore_eos=True)])
    driver.step([make_request(1, 5, max_new_tokens=NEW_TOKENS, ignore_eos=True)])
    driver.step([make_request(2, 5, max_new_tokens=NEW_TOKENS, ignore_eos=True)])
    arrived = {request_id: samples.added_s for request_id, samples in driver.state.unfinished.items()}
    first, second, third = sorted(arrived.values())
    assert first < second < third
    assert oldest_wait(driver.state, second + 61.0) == pytest.approx(61.0)
    waiting = next(request_id for request_id, added_s in arrived.items() if added_s == second)
    driver.step([CancelRequest(waiting)])
    assert oldest_wait(driver.state, third + 2.0) == pytest.approx(2.0)
    driver.run_until_idle()
    assert oldest_wait(driver.state, third) is None
    assert driver.state.step_totals.num_finished_requests == 2, "the cancelled one has not finished"


def test_a_learned_length_counts_and_not_the_longest_possible() -> None:
    class AlwaysFour:
        def expected(self, num_generated, max_new_tokens, _ranks):
            return (0 * num_generated + 4).clip(num_generated + 1, max_new_tokens)

    driver = EngineDriver(make_options(100, max_seqs_per_forward=2), forecast=AlwaysFour())
    request = replace(make_request(0, 5, num_sequences=6, max_new_tokens=50), ignore_eos=False)
    driver.step([request])
    left = work_left(driver.state)
    assert driver.state.stats().num_waiting == 4
    assert left is not None
    assert 6 * 4 <= left.num_tokens <= 6 * 10, "steps that were sent ahead count as computed"


def test_the_time_left_is_that_of_the_work_at_the_present_speed() -> None:
    driver = make_quick_driver(make_options(400, max_seqs_per_forward=12))
    driver.step([make_request(0, 5, num_sequences=30, max_new_tokens=40, ignore_eos=True)])
    assert engine_time_left(driver.state) is None
    now_s = 0.0
    note_pace(driver.state, now_s)
    for _ in range(20):
        driver.step([], 1)
        now_s += QUICK_STEP_SECONDS
    note_pace(driver.state, now_s)
    cost, left = step_cost(driver.state), engine_time_left(driver.state)
    assert cost is not None
    assert min(cost.per_step, cost.per_row) > 0
    # 12 of the 30 run at a time: three rounds of 40 steps, but the last has half as many. 20 steps are done.
    assert left is not None
    assert 75 * QUICK_STEP_SECONDS <= left.middle_s <= 110 * QUICK_STEP_SECONDS
    driver.step([JobsLeft(TimeLeft(1_000.0, 2_000.0))])
    assert engine_time_left(driver.state) == (1_000.0, 2_000.0), "jobs last longer"
    driver.step([JobsLeft(TimeLeft(0.001, 0.002))])
    assert engine_time_left(driver.state) == pytest.approx(left, rel=0.1), "what runs is of no job"
    driver.step([JobsLeft(None)])
    driver.run_until_idle()
    note_pace(driver.state, now_s)
    assert engine_time_left(driver.state) is None


def test_while_all_requests_are_of_jobs_the_time_left_is_that_of_the_jobs() -> None:
    driver = make_quick_driver(make_options(400, max_seqs_per_forward=12))
    driver.step([replace(make_request(0, 5, max_new_tokens=40), job="a job"), JobsLeft(TimeLeft(0.001, 0.002))])
    assert engine_time_left(driver.state) == (0.001, 0.002)
