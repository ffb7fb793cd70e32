"""What a step may take at most, judged from the steps before."""

import numpy as np
import pytest

from tokasaurus.manager.planning.step_times import CONTEXT_TOKENS, StepTimes, step_cost


def test_cost_counts_tokens_and_their_context() -> None:
    num_tokens, num_kv_tokens = np.array([1, 100], np.int32), np.array([3 * CONTEXT_TOKENS, CONTEXT_TOKENS])
    assert step_cost(num_tokens, num_kv_tokens) == 1 * 4 + 100 * 2


def test_before_any_step_the_start_value_counts_for_each_token() -> None:
    assert StepTimes(0.5).longest(100) == 50


def test_before_any_step_attention_is_not_taken_for_faster_than_it_is() -> None:
    """24,000 tokens with 500 of context, where attention takes ten times as long as all other work."""
    per_token, per_pair = 1e-5, 2e-7
    cost = step_cost(np.full(48, 500, np.int32), np.full(48, 500))
    seconds = 24_000 * (per_token + 500 * per_pair)
    assert seconds <= StepTimes(per_token, per_pair).longest(cost) < 3 * seconds


@pytest.mark.parametrize(("cost", "longest"), [(16, 0.1), (10, 0.1), (1, 0.1), (17, 0.2), (64, 0.4), (8192, 0.1 * 512)])
def test_a_cheaper_step_takes_no_longer_and_a_dearer_one_at_most_in_proportion(cost: float, longest: float) -> None:
    times = StepTimes(0.5)
    times.note(16, 0.1)
    assert times.longest(cost) == pytest.approx(longest)


def test_a_bound_from_a_long_step_does_not_loosen_that_of_short_ones() -> None:
    times = StepTimes(0.5)
    times.note(8192, 30.0)
    times.note(16, 0.1)
    assert times.longest(16) == pytest.approx(0.1)
    assert times.longest(8192) == pytest.approx(30.0)


def test_a_single_slow_step_is_forgotten_slowly() -> None:
    times = StepTimes(0.5)
    times.note(16, 5.0)
    times.note(16, 0.1)
    assert 4.5 < times.longest(16) < 5
    for _ in range(1000):
        times.note(16, 0.1)
    assert times.longest(16) == pytest.approx(0.1)


def test_bounds_hold_for_a_device_with_a_fixed_time_and_a_time_per_token() -> None:
    random = np.random.default_rng(1)
    times = StepTimes(0.5)
    for _ in range(300):
        cost = float(2 ** random.uniform(0, 13))
        seconds = 0.02 + 0.001 * cost
        if _ > 0:
            assert seconds <= 2 * times.longest(cost)
        times.note(cost, seconds)
