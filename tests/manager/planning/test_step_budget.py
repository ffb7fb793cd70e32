"""Tests the tokens of a step, the prefill rate and the steps ahead against slow and obvious versions."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.manager.planning.step_budget import (
    SECONDS_QUEUED,
    average_step_seconds,
    num_steps_to_keep_in_flight,
    prefill_rate,
    split_prefill,
    wants_another_step,
)


@given(prompts=st.lists(st.integers(1, 12), max_size=6), budget=st.integers(-3, 40))
def test_split_prefill_gives_the_budget_to_prompts_in_order_and_reads_no_further(prompts, budget):
    tokens = [number for number, num_tokens in enumerate(prompts) for _ in range(num_tokens)]
    expected = list(Counter(tokens[: max(0, budget)]).values())
    num_read = 0

    def read() -> Iterator[int]:
        nonlocal num_read
        for num_tokens in prompts:
            num_read += 1
            yield num_tokens

    assert split_prefill(read(), budget) == expected
    assert num_read <= len(expected) + (sum(expected) < budget), "reads no prompt beyond the budget: thousands may wait"


@given(
    sequences=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50)), min_size=1, max_size=8),
    multiple=st.integers(1, 20),
)
def test_prefill_rate_is_the_lowest_multiple_that_replaces_ending_sequences(sequences, multiple):
    """If N sequences decode at once, then in as many steps as all of them need in total, each ends N times."""
    prefill_tokens, decode_steps = (np.array(column) for column in zip(*sequences, strict=True))
    num_tokens_needed = len(sequences) * sum(num_tokens for num_tokens, _ in sequences)
    num_steps = max(1, sum(steps for _, steps in sequences))
    expected = multiple
    while expected * num_steps < num_tokens_needed:
        expected += multiple
    assert prefill_rate(prefill_tokens, decode_steps, multiple) == expected


def test_a_batch_keeps_its_size_if_prompts_prefill_at_the_rate():
    """20 sequences start evenly spread over their 50 decode steps; prompts of 30 tokens prefill at the rate."""
    num_left = [1 + 50 * number // 20 for number in range(20)]
    num_ready, sizes = 0, []
    rate = prefill_rate(np.full(20, 30), np.full(20, 50), 1)
    for _ in range(500):
        num_ready += rate
        num_left = [steps - 1 for steps in num_left if steps > 1]
        num_left += [50] * (num_ready // 30)
        num_ready %= 30
        sizes.append(len(num_left))
    assert 19 <= min(sizes[100:]) <= max(sizes[100:]) <= 21


@pytest.mark.parametrize("max_steps_ahead", [1, 2, 8, 100])
@pytest.mark.parametrize("step_seconds", [None, 0.0, 1e-5, 0.0004, 0.003, 0.0124, 0.0126, 0.024, 0.026, 0.1, 5.0])
def test_steps_ahead_are_the_fewest_that_keep_the_worker_busy(step_seconds, max_steps_ahead):
    if step_seconds is None or step_seconds == 0.0:
        expected = 2
    else:
        expected = 2
        while (expected - 1) * step_seconds < SECONDS_QUEUED:
            expected += 1
    assert num_steps_to_keep_in_flight(step_seconds, max_steps_ahead) == min(expected, max_steps_ahead)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ([], 2),
        ([0.002] * 20, 8),
        ([0.004] * 20, 8),
        ([0.01] * 20, 4),
        ([0.06, 0.002, 0.002], 2),
        ([0.002, 0.06, 0.002], 3),
        ([0.002] * 3 + [0.06] * 9, 5),
    ],
)
def test_steps_are_sent_until_enough_seconds_of_work_are_behind_the_running_one(behind, expected):
    """behind: times of the steps that would be sent behind the running one."""
    num_in_flight = 0
    while wants_another_step(num_in_flight, sum(behind[: max(0, num_in_flight - 1)]) if behind else None, 0.025, 8):
        num_in_flight += 1
    assert num_in_flight == expected


@pytest.mark.parametrize("seconds_queued", [None, 0.0, 1.0])
def test_max_steps_ahead_is_never_exceeded(seconds_queued):
    assert not wants_another_step(1, seconds_queued, 0.025, 1)
    assert wants_another_step(1, seconds_queued, 0.025, 2)
    assert not wants_another_step(2, seconds_queued, 0.025, 2)


def test_average_step_seconds_starts_at_the_first_step_and_follows_a_change():
    average = average_step_seconds(None, 0.1)
    assert average == 0.1
    for _ in range(10):
        assert average_step_seconds(average, 0.01) < average
        average = average_step_seconds(average, 0.01)
    assert 0.01 < average < 0.02
