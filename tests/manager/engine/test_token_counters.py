"""Tests the token counts of each sequence and in total against what the worker was sent."""

import random
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.manager.helpers.engine_driver import EndsNext, make_options
from tests.manager.helpers.requests import make_request, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation, simulate
from tests.manager.helpers.strategies import crowded_runs, runs
from tests.manager.helpers.token_counting import CountingDriver, check_counts, total
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions
from tokasaurus.manager.state.sequence import TokenCounts
from tokasaurus.messages.generation import CancelRequest


def run_and_check(shapes, options: EngineOptions, seed: int, cancel_share: float, forecast=None) -> CountingDriver:
    rng = random.Random(seed)
    driver = CountingDriver(options, forecast=forecast, rng=rng)
    requests = make_requests(shapes, options.limits)
    driver.run(requests, {request.request_id for request in requests if rng.random() < cancel_share}, check_share=0)
    driver.step()
    assert_equals_simulation(driver.deltas, requests)
    check_counts(driver)
    return driver


@examples(120)
@given(**runs)
def test_token_counts_equal_what_the_worker_was_sent(shapes, options, seed, cancel_share):
    run_and_check(shapes, options, seed, cancel_share)


def test_token_counts_equal_what_the_worker_was_sent_under_constant_preemption():
    sums = TokenCounts()

    @examples(200, 15)
    @given(**crowded_runs)
    def check(shapes, options, seed, cancel_share):
        nonlocal sums
        driver = run_and_check(shapes, options, seed, cancel_share, EndsNext())
        sums = total([sums, driver.state.totals.tokens])

    check()
    assert min(asdict(sums).values()) > (100 if IS_NIGHTLY else 10)


def test_samples_of_one_prompt_read_and_share_the_blocks_the_first_sample_computed():
    """23 prompt tokens in blocks of 4: the first sample computes all, the others read 5 blocks. All decode in one group
    whose prefix is these 5 blocks."""
    options = make_options(60, max_seqs_per_forward=8, max_tokens_per_forward=100, hydragen=HydragenOptions(2, 1))
    driver = CountingDriver(options)
    driver.step([make_request(1, 23, 3, 12, ignore_eos=True)])
    driver.run_until_idle()
    assert check_counts(driver) == TokenCounts(asked=69, cached=40, computed=23 + 3 + 3, recomputed=0, shared=60)
    assert driver.state.stats().total_prompt_tokens == 23


@pytest.mark.parametrize(
    ("num_steps", "counts"),
    [
        (0, TokenCounts(asked=0)),
        (1, TokenCounts(asked=30, computed=10)),
        (2, TokenCounts(asked=30, computed=20)),
        (9, TokenCounts(asked=30, computed=30)),
    ],
)
def test_tokens_computed_for_a_cancelled_request_are_counted(num_steps, counts):
    """The prompt of 30 tokens takes steps of 10 tokens, one step in flight at a time."""
    driver = CountingDriver(make_options(60, max_tokens_per_forward=10, scheduling_steps_ahead=1), (0.01,))
    request = make_request(1, 30, 1, 20, ignore_eos=True)
    if num_steps == 0:
        driver.step([request, CancelRequest("r1")])
    else:
        driver.step([request])
        for _ in range(num_steps - 1):
            driver.step([], 1)
        driver.step([CancelRequest("r1")])
    driver.run_until_idle()
    assert check_counts(driver) == counts if num_steps else driver.state.totals.tokens == counts


def test_preemption_recomputes_tokens_of_a_decode_step_in_flight():
    """Prompt of 7 tokens and one decode step, whose result is lost: one block of 4 tokens stays cached."""
    driver = CountingDriver(make_options(60, max_tokens_per_forward=10, scheduling_steps_ahead=2))
    driver.step([make_request(1, 7, 1, 20, ignore_eos=True)])
    (sequence,) = driver.running()
    assert driver.state.slots.num_kv_tokens[sequence.slot] == 8
    preempt(driver.state, sequence)
    driver.run_until_idle()
    assert check_counts(driver) == TokenCounts(asked=7, computed=7, recomputed=4)


def test_a_sequence_preempted_twice_counts_every_recomputed_token():
    """Prompt of 7 tokens in steps of 2. The first preemption loses the result of the first decode step; the second
    comes one step after readmission. Each time one block of 4 tokens stays cached."""
    driver = CountingDriver(make_options(60, max_tokens_per_forward=2, scheduling_steps_ahead=2))
    driver.step([make_request(1, 7, 1, 20, ignore_eos=True)])
    (sequence,) = driver.running()
    for num_kv_tokens in (8, 6):
        while not sequence.is_open or driver.state.slots.num_kv_tokens[sequence.slot] < num_kv_tokens:
            driver.step([], 1)
        preempt(driver.state, sequence)
    driver.run_until_idle()
    assert driver.worker.computed_ranges[1, 0] == [[0, 8], [4, 6], [4, 26]]
    assert check_counts(driver) == TokenCounts(asked=7, computed=7, recomputed=2 + 4)


def test_a_sequence_preempted_in_prefill_reads_blocks_that_others_cached_meanwhile():
    """A prompt of 26 tokens: the 6 prompt tokens and the first 20 completion tokens of a sequence that still decodes.
    It reads one block of 4, computes a chunk of 9 and is preempted. At readmission the other has cached 6 blocks."""
    driver = CountingDriver(make_options(60, max_tokens_per_forward=10, scheduling_steps_ahead=1), (0.01,))
    before = make_request(1, 6, 1, 40, ignore_eos=True)
    prompt_ids = np.array([*before.prompt_ids.tolist(), *simulate(before, 0)[0][:20]], np.int32)
    driver.step([before])
    for _ in range(25):
        driver.step([], 1)
    driver.step([replace(make_request(2, 1, 1, 5, ignore_eos=True), prompt_ids=prompt_ids)])
    (sequence,) = driver.state.unfinished["r2"].sequences
    while not sequence.is_open:
        driver.step([], 1)
    preempt(driver.state, sequence)
    driver.step([CancelRequest("r1")])
    driver.run_until_idle()
    check_counts(driver)
    assert driver.worker.computed_ranges[2, 0] == [[4, 13], [24, 30]]
    assert sequence.counts == TokenCounts(asked=26, cached=4 + 11, computed=9 + 2)
    assert [delta.num_cached_tokens for delta in driver.deltas] == [4], "as at its first admission"
