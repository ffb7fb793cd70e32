"""The work that is left, against the tokens that clients have asked for and those that have come back."""

import time
from dataclasses import replace

import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.work_left import work_left
from tokasaurus.messages.generation import CancelRequest

NEW_TOKENS = 9


def test_tokens_left_are_those_asked_for_without_those_that_came_back() -> None:
    driver = EngineDriver(make_options(40, max_seqs_per_forward=3))
    requests = [
        make_request(number, 5, num_sequences=2, max_new_tokens=NEW_TOKENS, ignore_eos=True) for number in range(4)
    ]
    num_asked, num_compared = 4 * 2 * NEW_TOKENS, 0
    assert work_left(driver.state, time.monotonic()).num_tokens is None, "nothing runs"
    driver.step(requests, 0)
    while driver.queue or driver.state.ending:
        left = work_left(driver.state, time.monotonic())
        stats = driver.state.stats()
        if left.num_tokens is not None:
            assert left.num_tokens == num_asked - stats.total_generation_tokens
            assert 0 <= left.num_steps <= NEW_TOKENS
            num_compared += 1
        assert (left.oldest_wait_s is not None) == (stats.num_waiting > 0)
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
    assert work_left(driver.state, second + 61.0).oldest_wait_s == pytest.approx(61.0)
    waiting = next(request_id for request_id, added_s in arrived.items() if added_s == second)
    driver.step([CancelRequest(waiting)])
    assert work_left(driver.state, third + 2.0).oldest_wait_s == pytest.approx(2.0)
    driver.run_until_idle()
    assert work_left(driver.state, third).oldest_wait_s is None
    assert driver.state.step_totals.num_finished_requests == 2, "the cancelled one has not finished"


def test_a_learned_length_counts_and_not_the_longest_possible() -> None:
    class AlwaysFour:
        def expected(self, num_generated, max_new_tokens, _ranks):
            return (0 * num_generated + 4).clip(num_generated + 1, max_new_tokens)

    driver = EngineDriver(make_options(100, max_seqs_per_forward=2), forecast=AlwaysFour())
    request = replace(make_request(0, 5, num_sequences=6, max_new_tokens=50), ignore_eos=False)
    driver.step([request])
    left = work_left(driver.state, time.monotonic())
    assert driver.state.stats().num_waiting == 4
    assert left.num_tokens is not None
    assert 6 * 4 <= left.num_tokens <= 6 * 10, "steps that were sent ahead count as computed"
