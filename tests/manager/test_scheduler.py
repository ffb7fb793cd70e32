"""Plans of steps and the number of steps ahead, against slow and obvious versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.manager.fake_worker import make_request
from tokasaurus.manager.scheduler import SECONDS_QUEUED, average_step_seconds, num_steps_to_keep_in_flight, plan_step
from tokasaurus.manager.sequence import Sequence, make_sequence


def make_prefilling(number: int, num_prompt_tokens: int, num_done: int = 0) -> Sequence:
    sequence = make_sequence(make_request(number, num_prompt_tokens), 0, 4, frozenset(), None)
    sequence.num_kv_tokens = num_done
    return sequence


@given(
    num_decoding=st.integers(0, 8),
    prompts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), max_size=6),
    max_tokens=st.integers(1, 30),
    max_rows=st.integers(1, 12),
)
def test_a_plan_deals_out_tokens_one_by_one(num_decoding, prompts, max_tokens, max_rows):
    decoding = [make_prefilling(number, 3, 3) for number in range(num_decoding)]
    prefilling = [make_prefilling(100 + row, max(size, done + 1), done) for row, (size, done) in enumerate(prompts)]
    wanted = [(sequence, 1) for sequence in decoding]
    wanted += [(sequence, sequence.num_prompt_tokens - sequence.num_kv_tokens) for sequence in prefilling]
    dealt: dict[Sequence, int] = {}
    for sequence, num_tokens in wanted:
        for _ in range(num_tokens):
            if sum(dealt.values()) < max_tokens and (sequence in dealt or len(dealt) < max_rows):
                dealt[sequence] = dealt.get(sequence, 0) + 1

    plan = plan_step(decoding, prefilling, max_tokens, max_rows)

    if plan is None:
        assert not dealt
    else:
        rows = [(sequence, 1) for sequence in plan.decode]
        rows += [(chunk.sequence, chunk.num_tokens) for chunk in plan.prefill]
        assert rows == list(dealt.items())
        assert plan.decode == [sequence for sequence in decoding if sequence in dealt]


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


def test_the_average_starts_at_the_first_step_and_follows_a_change():
    average = average_step_seconds(None, 0.1)
    assert average == 0.1
    for _ in range(10):
        assert average_step_seconds(average, 0.01) < average
        average = average_step_seconds(average, 0.01)
    assert 0.01 < average < 0.02
