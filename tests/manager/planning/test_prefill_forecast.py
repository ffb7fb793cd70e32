"""Tests the step in which each prefill ends against a scheduler that runs every step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.planning.kv_simulation import SequenceLoads
from tokasaurus.manager.planning.prefill_forecast import count_decoding, forecast_prefill

DECODING = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 5]), st.integers(0, 20)), max_size=8)
PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=8)

Decoding = list[tuple[int, int]]
"""Per running sequence: (steps before it decodes, decode steps)."""
Prompts = list[tuple[int, int]]
"""Per prompt: (tokens left to compute, decode steps afterwards)."""


def make_loads(decoding: Decoding) -> SequenceLoads:
    start_steps, num_steps = np.array(decoding, np.int64).reshape(-1, 2).T
    return SequenceLoads(np.zeros(len(decoding), np.int64), start_steps, num_steps)


def as_arrays(prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    num_left, decode_steps = np.array(prompts, np.int64).reshape(-1, 2).T
    return num_left, decode_steps


def run_every_step(decoding: Decoding, prompts: Prompts, max_tokens: int, prefill_rate: int | None) -> list[int]:
    """The step that computes each prompt's last token, from a scheduler that assigns tokens one by one."""
    left = [num_left for num_left, _ in prompts]
    done: dict[int, int] = {}
    step = 0
    while len(done) < len(prompts):
        step += 1
        budget = max_tokens - sum(start < step <= start + num_steps for start, num_steps in decoding)
        budget -= sum(end < step <= end + prompts[index][1] for index, end in done.items())
        if prefill_rate is not None:
            budget = min(budget, prefill_rate)
        for index in range(len(prompts)):
            while left[index] > 0 and budget > 0:
                left[index] -= 1
                budget -= 1
                if left[index] == 0:
                    done[index] = step
    return [done[index] for index in range(len(prompts))]


@examples(600)
@given(DECODING, PROMPTS, st.integers(1, 40), st.none() | st.integers(1, 20))
def test_prefill_ends_in_the_same_step_as_in_a_step_by_step_scheduler(decoding, prompts, max_tokens, prefill_rate):
    forecast = forecast_prefill(*as_arrays(prompts), count_decoding(make_loads(decoding)), max_tokens, prefill_rate)

    assert forecast.start_steps.tolist() == run_every_step(decoding, prompts, max_tokens, prefill_rate)


@examples(500)
@given(DECODING, st.lists(PROMPTS, min_size=2, max_size=4), st.integers(1, 40), st.none() | st.integers(1, 20))
def test_an_extended_forecast_equals_one_made_for_all_prompts(decoding, batches, max_tokens, prefill_rate):
    every = run_every_step(decoding, [prompt for batch in batches for prompt in batch], max_tokens, prefill_rate)
    forecast = forecast_prefill(*as_arrays(batches[0]), count_decoding(make_loads(decoding)), max_tokens, prefill_rate)

    continued = forecast.start_steps.tolist()
    for batch in batches[1:]:
        tried = forecast.extend(*as_arrays([(7, 3), *batch]))  # a candidate that is tried and dropped changes nothing
        forecast = forecast.extend(*as_arrays(batch))
        continued += forecast.start_steps.tolist()
        assert len(tried.start_steps) == len(batch) + 1

    assert continued == every


@examples(500)
@given(DECODING)
def test_decode_counts_equal_a_count_in_every_step(decoding):
    counts = count_decoding(make_loads(decoding))

    changes = dict(zip(counts.steps.tolist(), counts.counts.tolist(), strict=True))
    num_decoding = 0
    for step in range(1, 40):
        num_decoding = changes.pop(step, num_decoding)
        assert num_decoding == sum(start < step <= start + num_steps for start, num_steps in decoding)
    assert not changes
    assert counts.steps.tolist() == sorted(counts.steps.tolist())


def test_steps_without_room_for_prefill_are_skipped_at_once():
    counts = count_decoding(SequenceLoads(np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([9, 10**6])))

    forecast = forecast_prefill(np.array([3, 1]), np.array([5, 5]), counts, max_tokens=1, prefill_rate=None)

    assert forecast.start_steps.tolist() == [10**6 + 3, 10**6 + 9]
