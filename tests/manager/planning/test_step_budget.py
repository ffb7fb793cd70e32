"""Tests the tokens of a step, the prefill rate, the steps ahead and microbatches against slow and obvious versions."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.manager.planning.step_budget import (
    MIN_CHUNK,
    SECONDS_QUEUED,
    Pipeline,
    PrefillTime,
    StepLimit,
    make_step_limit,
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

    def read() -> Iterator[tuple[int, int]]:
        nonlocal num_read
        for num_tokens in prompts:
            num_read += 1
            yield 7, num_tokens

    assert split_prefill(read(), budget, PrefillTime(math.inf, 1.0, 1.0)) == expected
    assert num_read <= len(expected) + (sum(expected) < budget), "reads no prompt beyond the budget: thousands may wait"


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), max_size=6),
    budget=st.integers(1, 1000),
    seconds=st.floats(0.001, 2.0),
    per_token=st.sampled_from([0.0, 1e-4, 1e-3, 1.0]),
    per_pair=st.sampled_from([0.0, 1e-7, 1e-5]),
)
def test_split_prefill_adds_tokens_one_by_one_while_they_fit_into_the_time(
    prompts, budget, seconds, per_token, per_pair
):
    expected: list[int] = []
    left_s = seconds
    for start, left in prompts:
        chunk = 0
        while chunk < left and sum(expected) + chunk < budget:
            cost_s = (chunk + 1) * per_token + (chunk + 1) * (start + chunk + 1) * per_pair
            if cost_s > left_s * (1 + 1e-9) and sum(expected) + chunk >= MIN_CHUNK:
                break
            chunk += 1
        if chunk:
            expected.append(chunk)
        if chunk < left:
            break
        left_s -= chunk * per_token + chunk * (start + chunk) * per_pair
    found = split_prefill(prompts, budget, PrefillTime(seconds, per_token, per_pair))
    assert sum(found) == pytest.approx(sum(expected), abs=1)  # a sum of rounded floats may or may not reach the limit
    assert len(found) <= len(expected) + 1
    assert found[:-1] == [left for _, left in prompts][: len(found) - 1], "only the last prompt is cut"


@pytest.mark.parametrize(("per_token", "per_pair"), [(1e-3, 0.0), (1e-3, 1e-6), (0.0, 1e-6)])
def test_the_usual_rate_is_that_of_prompts_computed_in_chunks(per_token, per_pair):
    time, prompts = PrefillTime(0.5, per_token, per_pair), [(500, 4000), (0, 2000), (3000, 1000)]
    starts, num_left = (np.array(column) for column in zip(*prompts, strict=True))
    num_steps = 0
    while prompts:
        chunks = split_prefill(prompts, 10**6, time)
        moved = [
            (start + chunk, left - chunk) for (start, left), chunk in zip(prompts, chunks, strict=False) if chunk < left
        ]
        prompts = moved + prompts[len(chunks) :]
        num_steps += 1
    assert time.usual_rate(starts, num_left) == pytest.approx(7000 / num_steps, rel=0.12)
    assert PrefillTime(0.5, 0.0, 0.0).usual_rate(starts, num_left) == math.inf


def test_prompts_get_the_time_that_decoding_leaves_but_at_least_half():
    limit = StepLimit(seconds=2.0, stream_seconds=0.5)
    assert limit.prefill_seconds(0.5, is_streaming=False) == 1.5
    assert limit.prefill_seconds(0.1, is_streaming=True) == pytest.approx(0.4)
    assert limit.prefill_seconds(5.0, is_streaming=True) == 0.25
    assert StepLimit().prefill_seconds(5.0, is_streaming=True) == math.inf


def test_a_flag_sets_the_limit_of_a_step():
    assert make_step_limit(0.125, seconds_per_step=3.0) == StepLimit(0.125, 0.125)


@pytest.mark.parametrize("seconds_per_step", [0.0, 0.002, 0.01, 0.03, 0.3])
def test_without_a_flag_a_step_is_short_unless_that_would_cost_two_percent(seconds_per_step):
    limit = make_step_limit(None, seconds_per_step)
    overhead = seconds_per_step / limit.seconds
    assert overhead <= 0.02 + 1e-9
    assert limit.seconds == 0.25 or overhead == pytest.approx(0.02), "no longer than needed"
    assert limit.stream_seconds == min(1.0, limit.seconds)


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


@pytest.mark.parametrize("scheduling_steps_ahead", [1, 2, 8, 100])
@pytest.mark.parametrize("step_seconds", [None, 0.0, 1e-5, 0.0004, 0.003, 0.0124, 0.0126, 0.024, 0.026, 0.1, 5.0])
def test_steps_ahead_are_the_fewest_that_keep_the_worker_busy(step_seconds, scheduling_steps_ahead):
    if step_seconds is None or step_seconds == 0.0:
        expected = 2
    else:
        expected = 2
        while (expected - 1) * step_seconds < SECONDS_QUEUED:
            expected += 1
    assert num_steps_to_keep_in_flight(step_seconds, scheduling_steps_ahead) == min(expected, scheduling_steps_ahead)


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
def test_scheduling_steps_ahead_is_never_exceeded(seconds_queued):
    assert not wants_another_step(1, seconds_queued, 0.025, 1)
    assert wants_another_step(1, seconds_queued, 0.025, 2)
    assert not wants_another_step(2, seconds_queued, 0.025, 2)


def round_time(pp_size: int, lengths: list[float]) -> float:
    """Of a pipeline in which these steps, one of each microbatch, go round; a microbatch's next step begins after its
    last one has left the last stage."""
    free = [0.0] * pp_size
    left = [0.0] * len(lengths)
    ends = []
    for _ in range(60):
        for microbatch, length in enumerate(lengths):
            ready = left[microbatch]
            for stage in range(pp_size):
                ready = free[stage] = max(ready, free[stage]) + length
            left[microbatch] = ready
        ends.append(left[-1])
    return (ends[-1] - ends[-21]) / 20


@pytest.mark.parametrize(("pp_size", "num_microbatches"), [(2, 3), (2, 4), (4, 5), (4, 6), (3, 5)])
def test_spare_tokens_delay_no_other_step_and_more_tokens_would(pp_size: int, num_microbatches: int) -> None:
    num_decoding = 1200  # divisible, and far above the 64 tokens that any step may have
    pipeline = Pipeline(pp_size, num_microbatches, max_tokens_per_forward=10_000)
    num_spare = pipeline.max_prefill(num_decoding, num_all_tokens=num_microbatches * num_decoding)

    def lost(num_more: int) -> float:
        """Time in which the stages compute nothing, in a round."""
        lengths = [float(num_decoding)] * (num_microbatches - 1) + [float(num_decoding + num_more)]
        return round_time(pp_size, lengths) - sum(lengths)

    assert lost(num_spare) == pytest.approx(0)
    assert lost(num_spare + 10) > 1


@pytest.mark.parametrize(
    ("num_decoding", "num_all_tokens", "most"),
    [
        (100, 1000, 150),  # a quarter of all for each of four steps
        (100, 400, 64),
        (300, 1200, 150),  # half of its rows: (4 - 3) / (3 - 1)
        (0, 0, 64),
        (280, 4000, 232),  # no more than 512 in all
    ],
)
def test_a_steps_prompt_tokens_by_hand(num_decoding: int, num_all_tokens: int, most: int) -> None:
    assert Pipeline(3, 4, max_tokens_per_forward=512).max_prefill(num_decoding, num_all_tokens) == most


@pytest.mark.parametrize(
    ("num_decoding", "num_left", "rate"),
    [
        ([10] * 5, [40] * 5, 200),  # all in one round
        ([10] * 5, [100, 0, 0, 0, 0], 50),  # 64 and 36
        ([10] * 5, [0, 500, 0, 0, 0], 72),  # 100, 80 and five times 64: seven rounds
        ([0] * 5, [64, 64, 64, 0, 0], 192),
        ([10] * 5, [0] * 5, None),
        ([512] * 5, [9] * 5, None),  # no room
    ],
)
def test_prompt_tokens_of_a_round_by_hand(num_decoding: list[int], num_left: list[int], rate: int | None) -> None:
    assert Pipeline(4, 5, max_tokens_per_forward=512).prefill_per_round(num_decoding, num_left) == rate
