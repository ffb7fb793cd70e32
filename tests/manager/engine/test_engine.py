"""Tests the whole engine against a worker that checks every message and against a token-by-token simulation."""

import random

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner, block_table
from tests.manager.helpers.engine_driver import NEVER_LEARNS, EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import Shape, make_request, make_requests, sequence_keys
from tests.manager.helpers.simulation import assert_equals_simulation, simulate
from tests.manager.helpers.strategies import crowded_runs, runs
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.planning.length_predictor import Forecast
from tokasaurus.manager.state.engine_state import EngineOptions
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.generation import CancelRequest


def check_run(
    shapes: list[Shape],
    options: EngineOptions,
    seed: int,
    cancel_share: float,
    forecast: Forecast | None = None,
    pause_rate: float = 0.0,
) -> EngineDriver:
    """Run random requests to the end, cancel some of them, and check every delta and the final stats."""
    rng = random.Random(seed)
    driver = EngineDriver(options, forecast=forecast, rng=rng, pause_rate=pause_rate)
    requests = make_requests(shapes, options.limits)
    cancelled = {request.request_id for request in requests if rng.random() < cancel_share}
    driver.run(requests, cancelled)

    assert_equals_simulation(driver.deltas, requests)
    assert_versions_follow_updates(driver)
    finished = {(delta.request_id, delta.sequence_index) for delta in driver.deltas}
    for request in requests:
        for index in range(request.num_sequences):
            assert (request.request_id, index) in finished or request.request_id in cancelled
    for delta in driver.deltas:
        key = int(delta.request_id[1:]), delta.sequence_index
        assert delta.num_cached_tokens == driver.worker.first_positions[key]
    num_returned = sum(len(delta.token_ids) for delta in driver.deltas)
    stats = driver.state.stats()
    if cancelled:
        assert stats.total_generation_tokens >= num_returned
    else:
        assert stats.total_generation_tokens == num_returned
        assert stats.total_prompt_tokens == sum(len(request.prompt_ids) for request in requests)
        # The total includes tokens found at readmission after a preemption in prefill; num_cached_tokens does not.
        num_asked = sum(len(request.prompt_ids) * request.num_sequences for request in requests)
        assert stats.total_prefix_cache_hit_tokens == num_asked - sum(d.num_computed_tokens for d in driver.deltas)
    for reader, writer in driver.worker.read_from:
        assert requests[reader].cache_salt == requests[writer].cache_salt
    first_openings = list(dict.fromkeys(driver.worker.opened))
    # With several microbatches, each is served in turn; adapters get their turns; who starts from a state that is being
    # computed lets others go first.
    in_order = options.num_microbatches == 1 and not options.limits.num_snapshots
    for adapter in {request.adapter for request in requests} if in_order else ():
        own = [key for key in first_openings if requests[key[0]].adapter == adapter]
        assert own == [key for key in sequence_keys(requests) if key in own], "first come first served"
    driver.assert_nothing_is_left()
    return driver


def assert_versions_follow_updates(driver: EngineDriver) -> None:
    """Each span of a completion has tokens, and is of later weights than the one before."""
    for delta in driver.deltas:
        if delta.finish_reason is None or delta.error or delta.weight_versions[0][1].startswith("version of"):
            continue
        starts, versions = zip(*delta.weight_versions, strict=True)
        numbers = [driver.versions.index(version) for version in versions]
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert numbers == sorted(set(numbers))


@examples(250, 20)
@given(**runs)
def test_every_sequence_equals_its_simulation_and_leaves_no_state(shapes, options, seed, cancel_share):
    check_run(shapes, options, seed, cancel_share)


def test_every_sequence_equals_its_simulation_with_pauses_and_new_weights():
    num_updates = num_refused = num_crossings = 0

    @examples(250, 20)
    @given(**runs)
    def check(shapes, options, seed, cancel_share):
        nonlocal num_updates, num_refused, num_crossings
        driver = check_run(shapes, options, seed, cancel_share, pause_rate=0.1)
        num_updates += len(driver.versions) - 1
        num_refused += sum(done.error != "" for done in driver.done)
        num_crossings += sum(len(delta.weight_versions) > 1 for delta in driver.deltas)

    check()
    assert min(num_updates, num_refused, num_crossings) > 5


def test_every_sequence_equals_its_simulation_under_constant_preemption():
    num_preemptions = num_groups = 0

    @examples(250, 20)
    @given(**crowded_runs)
    def check(shapes, options, seed, cancel_share):
        nonlocal num_preemptions, num_groups
        driver = check_run(shapes, options, seed, cancel_share, EndsNext())
        num_preemptions += driver.state.totals.preemptions
        num_groups += sum(map(len, driver.worker.grouped))

    check()
    assert num_preemptions > (50 if IS_NIGHTLY else 5)
    assert num_groups > (50 if IS_NIGHTLY else 5)


def prefills_shared_blocks(driver: EngineDriver, sequence: Sequence) -> bool:
    """Whether it is still prefilling blocks with which the prompt of another admitted request begins."""
    others = [other for other in driver.running() if other.request is not sequence.request and not other.is_open]
    is_prefilling = sequence.phase is Phase.PREFILL and sequence.is_open
    tables, num_blocks = driver.state.slots.block_tables, sequence.num_tree_blocks
    return is_prefilling and any(
        other.num_tree_blocks >= num_blocks
        and np.array_equal(tables[other.slot, :num_blocks], tables[sequence.slot, :num_blocks])
        for other in others
    )


def is_in_situation(driver: EngineDriver, sequence: Sequence, situation: str) -> bool:
    is_new = sequence.num_cached_tokens is None
    return {
        "waiting": sequence.phase is Phase.WAITING and is_new,
        "admitted and not yet sent": sequence.phase is Phase.PREFILL and is_new,
        "prefilling blocks that others share": prefills_shared_blocks(driver, sequence),
        "decoding": sequence.phase is Phase.DECODE,
        "waiting for its last results": sequence.phase is Phase.DRAINING,
        "preempted": sequence.phase is Phase.WAITING and not is_new,
    }[situation]


SITUATIONS = [
    "waiting",
    "admitted and not yet sent",
    "prefilling blocks that others share",
    "decoding",
    "waiting for its last results",
    "preempted",
]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_cancelling_a_request_in_any_situation_changes_no_other_request(situation):
    num_cancelled, num_seeds = 0, 60 if IS_NIGHTLY else 9
    for seed in range(num_seeds):
        rng = random.Random(seed)
        options = make_options(
            24,
            max_tokens_per_forward=6,
            max_seqs_per_forward=6,
            **NEVER_LEARNS,
            precise_onboard_batch_size=8,
        )
        driver = EngineDriver(options, forecast=EndsNext(), rng=rng)
        requests = make_requests(
            [Shape(0, rng.choice([20, 24, 31]), rng.choice([0, 0, 3]), 2, 16, (), False, True) for _ in range(6)],
            options.limits,
        )
        unsent, cancelled = list(requests), set()
        while unsent or driver.queue:
            driver.step([unsent.pop(0) for _ in range(rng.randint(0, 3)) if unsent], rng.randint(0, 2))
            sequences = [sequence for samples in driver.state.unfinished.values() for sequence in samples.sequences]
            eligible = [sequence for sequence in sequences if is_in_situation(driver, sequence, situation)]
            if eligible and not cancelled and rng.random() < 0.5:
                request_id = rng.choice(eligible).request.request_id
                cancelled.add(request_id)
                driver.step([CancelRequest(request_id), CancelRequest("never seen"), CancelRequest(request_id)])
                assert request_id not in driver.state.unfinished
                assert_each_block_has_one_owner(driver.state)
        driver.step([CancelRequest(request.request_id) for request in requests])
        assert_equals_simulation(driver.deltas, requests)
        others = [request for request in requests if request.request_id not in cancelled]
        finished = {(delta.request_id, delta.sequence_index) for delta in driver.deltas}
        assert finished >= {(request.request_id, index) for request in others for index in range(2)}
        driver.assert_nothing_is_left()
        num_cancelled += len(cancelled)
    assert num_cancelled >= num_seeds / 3


@pytest.mark.parametrize("step_seconds", [0.0001, 0.01])
def test_sending_steps_ahead_changes_no_token(step_seconds):
    requests = [make_request(n, 3 + 5 * n, 3, 20, ("abc",) if n % 2 else ()) for n in range(6)]
    results = []
    for scheduling_steps_ahead in (1, 8):
        driver = EngineDriver(make_options(scheduling_steps_ahead=scheduling_steps_ahead), (step_seconds,))
        driver.assume_step_seconds(step_seconds)
        driver.step(requests)
        driver.run_until_idle()
        results.append({(delta.request_id, delta.sequence_index): delta.token_ids for delta in driver.deltas})
        assert (
            driver.max_in_flight
            == {(1, 0.0001): 1, (1, 0.01): 1, (8, 0.0001): 8, (8, 0.01): 4}[scheduling_steps_ahead, step_seconds]
        )
    assert results[0] == results[1]
    assert len(results[0]) == 18


@pytest.mark.parametrize("steps_before", range(12))
def test_a_cancelled_request_frees_its_slots_and_blocks_in_the_same_step(steps_before):
    kept = make_request(1, 30, 1, 16, ignore_eos=True)
    cancelled = make_request(2, 30, 2, 12, ignore_eos=True)
    driver = EngineDriver(make_options(30))
    driver.step([kept, cancelled])
    for _ in range(steps_before):
        driver.step([], 1)
    driver.step([CancelRequest("r2")])
    assert list(driver.state.unfinished) == ["r1"]
    (sequence,) = driver.running()
    assert sequence.request is kept
    assert driver.state.stats().num_kv_blocks_used == len(block_table(driver.state, sequence))
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, [kept])
    assert len(driver.deltas) == 1
    driver.assert_nothing_is_left()


def test_prefill_and_decode_share_every_step():
    """A long prefill does not stop other sequences from decoding, and takes no more steps than its tokens need."""
    driver = EngineDriver(
        make_options(60, max_tokens_per_forward=10, scheduling_steps_ahead=1, deferred_tasks="always")
    )
    short = make_request(1, 4, 1, 30, ignore_eos=True)
    long = make_request(2, 90, 1, 1, ignore_eos=True)
    driver.step([short])
    driver.step([long], 1)
    while not all(sequence.is_open for sequence in driver.running()):
        driver.step([], 1)
    first, second = (sequence for samples in driver.state.unfinished.values() for sequence in samples.sequences)
    num_before = len(sampled_tokens(driver.state, first))
    num_steps = 0
    while second.phase is not Phase.FINISHED:
        driver.step([], 1)
        num_steps += 1
    assert num_steps == 10, "90 prompt tokens: 9 in each step beside one decode token"
    assert len(sampled_tokens(driver.state, first)) == num_before + num_steps


def test_a_stop_at_the_last_allowed_token_has_finish_reason_stop():
    for number in range(200):
        request = make_request(number, max_new_tokens=64)
        token_ids, _, finish_reason = simulate(request, 0)
        if finish_reason == "stop" and len(token_ids) > 1:
            break
    exact = make_request(number, max_new_tokens=len(token_ids))
    shorter = make_request(number, max_new_tokens=len(token_ids) - 1)
    for request, reason in ((exact, "stop"), (shorter, "length")):
        driver = EngineDriver()
        driver.step([request])
        driver.run_until_idle()
        assert [delta.finish_reason for delta in driver.deltas] == [reason]


def test_if_many_results_arrive_at_once_steps_are_sent_before_all_are_applied():
    """The worker has two steps left when six results are seen: it should not wait until all six are applied."""
    driver = EngineDriver(make_options(200), (0.002,))
    driver.assume_step_seconds(0.002)
    request = make_request(1, 5, 4, 60, ignore_eos=True)
    driver.step([request])
    assert len(driver.queue) == 8
    applied: list[int] = []
    send = driver.engine._send
    driver.engine._send = lambda message: (applied.append(driver.state.last_result_id), send(message))
    driver.step([], 6)
    assert len(driver.queue) == 8
    assert applied[-1] == 5
    assert applied[0] < 5
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, [request])
    assert driver.max_in_flight == 8
