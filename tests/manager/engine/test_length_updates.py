"""Tests when the forecast of completion lengths is updated, and from which sequences."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import Shape, make_requests
from tokasaurus.manager.engine.kv_forecast import forecast_is_old, note_ends, running_progress, update_forecast
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.planning.length_predictor import CompletionLengths, fit_forecast
from tokasaurus.manager.state.engine_state import make_state


@given(
    ends=st.lists(st.integers(0, 60), max_size=20),
    initial_wait=st.integers(0, 50),
    buffer_size=st.sampled_from([1, 50, 128, 1000]),
)
def test_a_forecast_is_old_once_a_64th_of_the_remembered_ends_is_new(ends, initial_wait, buffer_size):
    flags = {"early_stopping_buffer_size": buffer_size, "early_stopping_initial_wait": initial_wait}
    state = make_state(make_options(use_spec_allocation=True, **flags))
    num_ended = num_known = 0
    for num_new in ends:
        state.lengths.new_ends = [(3, True)] * num_new
        note_ends(state)
        assert state.lengths.new_ends == []
        num_ended += num_new
        num_remembered = min(num_ended, buffer_size)
        expected = (
            num_ended >= initial_wait and num_ended > num_known and 64 * (num_ended - num_known) >= num_remembered
        )
        assert forecast_is_old(state) is expected
        if expected:
            update_forecast(state)
            num_known = num_ended
            assert not forecast_is_old(state)


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    buffer_size=st.sampled_from([4, 100]),
    num_prediction_buckets=st.sampled_from([3, 1000]),
    num_microbatches=st.sampled_from([1, 3]),
)
def test_the_forecast_uses_only_sequences_that_may_stop_early(
    seed, buffer_size, num_prediction_buckets, num_microbatches
):
    """Sequences that can only end at max_new_tokens are left out, whether running or ended. With microbatches, a
    sequence samples a token in each round of steps."""
    rng = random.Random(seed)
    driver = EngineDriver(
        make_options(
            60,
            max_seqs_per_forward=8,
            use_spec_allocation=True,
            early_stopping_buffer_size=buffer_size,
            early_stopping_num_prediction_buckets=num_prediction_buckets,
            early_stopping_initial_wait=10**6,
            deferred_tasks="always",
            num_microbatches=num_microbatches,
        ),
        rng=rng,
    )
    shapes = [
        Shape(0, rng.randint(0, 9), 1, 3, 30, rng.choice([(), ("ab",)]), ignore_eos=rng.random() < 0.3)
        for _ in range(8)
    ]
    requests = make_requests(shapes, driver.options.limits)
    may_stop = {request.request_id for request in requests if not request.ignore_eos or request.stop_strings}
    driver.step(requests)
    lengths = CompletionLengths(buffer_size)
    for _ in range(rng.randint(5, 40)):
        # A sequence that a stop string ends is recorded with the results of the next step.
        deltas = [delta for delta in driver.step([], rng.randint(0, 2)) if delta.request_id in may_stop]
        driver.step()
        if deltas:
            ended = [len(delta.token_ids) for delta in deltas]
            stopped = [delta.finish_reason == "stop" for delta in deltas]
            lengths.record(np.array(ended), np.array(stopped), driver.state.last_result_id // num_microbatches)
    running = [
        len(sequence.kept_token_ids) + len(sampled_tokens(driver.state, sequence))
        for sequence in driver.running()
        if sequence.request.request_id in may_stop
    ]
    newest_round = driver.state.last_result_id // num_microbatches
    expected = fit_forecast(lengths, np.array(running, np.int64), newest_round, num_prediction_buckets, 0.25)
    update_forecast(driver.state)
    assert driver.state.lengths.forecast is not None
    cases = np.arange(30)
    for rank in range(3):
        ranks = np.full(30, rank)
        assert (
            driver.state.lengths.forecast.expected(cases, cases + 7, ranks).tolist()
            == expected.expected(cases, cases + 7, ranks).tolist()
        )


@pytest.mark.parametrize("seed", range(6))
def test_progress_of_sequences_that_report_it_is_their_tokens_and_the_forecast(seed):
    """At every step, with preemptions: nothing is expected of a sequence that may stop until there is a forecast."""
    rng = random.Random(seed)
    flags = {"use_spec_allocation": True, "early_stopping_initial_wait": 4}
    driver = EngineDriver(make_options(20, max_seqs_per_forward=8, **flags), rng=rng)
    shapes = [Shape(0, rng.randint(0, 9), 1, 3, rng.randint(1, 30), ignore_eos=rng.random() < 0.5) for _ in range(9)]
    requests = [
        dataclasses.replace(request, job="a job" if number % 3 else "")
        for number, request in enumerate(make_requests(shapes, driver.options.limits))
    ]
    asked = {request.request_id: request for request in requests}
    driver.step(requests)
    num_seen = {True: 0, False: 0}
    for _ in range(60):
        driver.step([], rng.randint(0, 2))
        reporting = [sequence for sequence in driver.running() if sequence.request.job]
        found = {entry[:2]: entry for entry in running_progress(driver.state)}
        assert found.keys() == {(sequence.request.request_id, sequence.index) for sequence in reporting}
        for sequence in reporting:
            entry = found[sequence.request.request_id, sequence.index]
            num_tokens = len(sequence.kept_token_ids) + len(sampled_tokens(driver.state, sequence))
            assert entry.num_tokens == num_tokens
            request, forecast = asked[entry.request_id], driver.state.lengths.forecast
            if request.ignore_eos:
                assert entry.num_expected_tokens == request.max_new_tokens
            elif forecast is None:
                assert entry.num_expected_tokens is None
            else:
                rank = driver.state.slots.admitted_at[[sequence.slot]]
                expected = forecast.expected(np.array([num_tokens]), np.array([request.max_new_tokens]), rank)
                assert entry.num_expected_tokens == expected[0] > num_tokens
            num_seen[entry.num_expected_tokens is None] += 1
    assert num_seen[False] > 0


@pytest.mark.parametrize("initial_wait", [1, 6])
def test_no_forecast_exists_before_initial_wait_sequences_have_ended(initial_wait):
    flags = {"use_spec_allocation": True, "early_stopping_initial_wait": initial_wait}
    driver = EngineDriver(make_options(60, deferred_tasks="always", **flags))
    requests = make_requests([Shape(0, 5, 2, 1, 8, ignore_eos=False)] * 8, driver.options.limits)
    for num_ended, request in enumerate(requests):
        assert (driver.state.lengths.forecast is not None) == (num_ended >= initial_wait)
        driver.step([request])
        driver.run_until_idle()


def test_a_prior_forecast_is_used_until_initial_wait_sequences_have_ended():
    flags = {
        "early_stopping_init_mean": 0.3,
    }
    state = make_state(make_options(use_spec_allocation=True, **flags))
    assert state.lengths.forecast is not None
    none, most = np.zeros(3, np.int64), np.array([10, 20, 100])
    assert state.lengths.forecast.expected(none, most, np.arange(3)).tolist() == [3, 6, 30]
