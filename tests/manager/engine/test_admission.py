"""Tests admission against plain counting, and against the engine itself run to the end without further admissions."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner
from tests.manager.helpers.engine_driver import (
    QUICK_STEP_SECONDS,
    EndsNext,
    EngineDriver,
    make_options,
    make_quick_driver,
    with_flags,
)
from tests.manager.helpers.kv_usage_replay import copy_state, replay_usage
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tests.manager.helpers.strategies import CACHE_SALTS, WINDOWS, random_shape
from tokasaurus.manager.engine import admission
from tokasaurus.manager.engine.admission import (
    MAX_STEPS_BLOCKED,
    RUNNING_PER_RELEASE,
    admit_described,
    admit_waiting,
    can_admit,
    describe,
    num_fitting,
    num_obviously_fitting,
    simulate_candidates,
)
from tokasaurus.manager.engine.engine import next_step
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.engine.lifecycle import admit
from tokasaurus.manager.engine.outputs import apply_output, release_ending
from tokasaurus.manager.engine.requests import add_request, cancel_request, release_cancelled
from tokasaurus.manager.planning.kv_simulation import SequenceLoads, SharedLoads, fits_together, simulate_kv
from tokasaurus.manager.state.engine_state import EngineOptions, EngineState
from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.status import EngineLimits

shapes_strategy = st.lists(
    random_shape(
        max_new_tokens=st.integers(1, 30),
        cache_salt=st.sampled_from(CACHE_SALTS),
        prompt_top=st.sampled_from([None, None, None, 0, 2]),
    ),
    min_size=2,
    max_size=8,
)

options_strategy = st.builds(
    make_options,
    num_blocks=st.integers(18, 40),
    page_size=st.sampled_from([3, 4]),
    max_tokens_per_forward=st.integers(4, 40),
    max_seqs_per_forward=st.integers(2, 30),
    scheduling_steps_ahead=st.sampled_from([1, 2, 8]),
    enable_precise_onboard=st.sampled_from([True, True, True, False]),
    precise_onboard_batch_size=st.sampled_from([1, 3, 128]),
    greedy_prefill=st.booleans(),
    prefill_round_up_multiple=st.sampled_from([1, 4]),
    spec_allocation_target_kv_cache_utilization=st.sampled_from([1.0, 1.0, 0.7]),
)


def can_be_admitted(state: EngineState) -> bool:
    """Whether the first waiting sequence could be admitted now without blocks running out in any later step."""
    state = copy_state(state)
    sequence = state.queues.take_first_waiting()
    match = state.blocks.tree.match(
        sequence.prompt.token_bytes, sequence.salt, (len(sequence.prompt) - 1) // state.options.limits.page_size
    )
    node = state.blocks.tree.acquire(match)
    num_own = -(-len(sequence.prompt) // state.options.limits.page_size) - match.num_blocks
    is_available = num_own <= state.blocks.num_available
    state.blocks.tree.release(node)
    if not is_available:
        return False
    admit(state, sequence)
    share = state.options.config.spec_allocation_target_kv_cache_utilization
    return max(replay_usage(state)) <= int(share * state.blocks.num_blocks)


def stop_halfway(shapes: list[Shape], options: EngineOptions, seed: int) -> tuple[EngineState, list[Sequence]]:
    """An engine that has run some of the requests for a while, and the waiting sequences."""
    driver = make_quick_driver(options, seed)
    requests = make_requests(shapes, options.limits)
    num_first = driver.rng.randint(0, len(requests) - 1)
    driver.step(requests[:num_first])
    for _ in range(driver.rng.randint(0, 12)):
        driver.step([], driver.rng.randint(0, 2))
    for request in requests[num_first:]:
        add_request(driver.state, request)
    return driver.state, driver.state.queues.first_waiting(100)


@examples(180)
@given(
    shapes=shapes_strategy,
    options=options_strategy,
    seed=st.integers(0, 2**32),
    forecast=st.sampled_from([None, EndsNext()]),
)
def test_no_sequence_is_preempted_when_lengths_are_known(shapes, options, seed, forecast):
    """All sequences ignore eos, so they reach max_new_tokens and no forecast applies to them."""
    driver = make_quick_driver(options, seed, forecast)
    requests = make_requests(shapes, options.limits)
    longest = max(len(request.prompt_ids) + request.max_new_tokens - 1 for request in requests)
    num_alone = -(-longest // options.limits.page_size)
    share = options.config.spec_allocation_target_kv_cache_utilization
    most = max(num_alone, int(share * options.limits.num_kv_blocks))
    while requests or driver.queue:
        driver.step([requests.pop(0) for _ in range(driver.rng.randint(0, 2)) if requests], driver.rng.randint(0, 2))
        assert driver.state.blocks.num_used <= most
    assert driver.state.totals.preemptions == 0
    driver.assert_nothing_is_left()


@examples(180)
@given(shapes=shapes_strategy, options=options_strategy, seed=st.integers(0, 2**32), windows=st.sampled_from(WINDOWS))
def test_no_sequence_is_preempted_though_layers_with_windows_give_blocks_back(shapes, options, seed, windows):
    num_blocks, page_size = options.limits.num_kv_blocks, options.limits.page_size
    limits = make_options(num_blocks, page_size, windows=windows).limits
    driver = make_quick_driver(dataclasses.replace(options, limits=limits), seed)
    requests = make_requests(shapes, limits)
    share, most_at_once = (
        options.config.spec_allocation_target_kv_cache_utilization,
        options.config.max_tokens_per_forward,
    )
    most = int(share * limits.num_kv_blocks)
    for request in requests:
        num_pages = -(-(len(request.prompt_ids) + request.max_new_tokens - 1) // page_size)
        most = max(most, num_pages + windows.num_groups * min(num_pages, windows.num_held(page_size, most_at_once)))
    while requests or driver.queue:
        driver.step([requests.pop(0) for _ in range(driver.rng.randint(0, 2)) if requests], driver.rng.randint(0, 2))
        assert driver.state.blocks.num_used <= most
    assert driver.state.totals.preemptions == 0
    driver.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "cached", "shapes"),
    [
        (21, 6, [(0, 30, 0), (1, 24, 0)], [(3, 18, 1, 2, 30), (0, 6, 3, 1, 6)]),
        (22, 7, [(0, 30, 0), (1, 30, 0)], [(2, 6, 3, 1, 15), (3, 24, 1, 2, 30), (1, 6, 1, 1, 6)]),
        (25, 13, [(0, 18, 0), (1, 30, 0)], [(3, 30, 3, 1, 15), (2, 30, 3, 1, 30), (1, 30, 1, 2, 6)]),
    ],
)
def test_admission_does_not_evict_the_cached_prompts_of_sequences_it_admits_next(
    num_blocks, max_tokens, cached, shapes
):
    """If its cached prompt were evicted, a sequence would start later than simulated and another would be preempted."""
    options = make_options(
        num_blocks, 3, max_tokens_per_forward=max_tokens, max_seqs_per_forward=12, scheduling_steps_ahead=1
    )
    driver = make_quick_driver(options)
    before = [Shape(*prompt, num_sequences=1, max_new_tokens=1) for prompt in cached]
    requests = make_requests([*before, *(Shape(*shape) for shape in shapes)], options.limits)
    for request in requests[: len(before)]:
        driver.step([request])
        driver.run_until_idle(1)
    driver.step(requests[len(before) :])
    driver.run_until_idle(1)
    assert driver.state.totals.preemptions == 0


@examples(120)
@given(
    shapes=shapes_strategy,
    options=options_strategy,
    num_ahead=st.integers(1, 2),
    batch=st.sampled_from([1, 3, 128]),
    seed=st.integers(0, 2**32),
)
def test_a_sequence_waits_only_if_blocks_would_run_out(shapes, options, num_ahead, batch, seed):
    """An exact check: with at most two steps in flight it is known when blocks become free, and once admission has
    stopped, the first waiting sequence is simulated on its own."""
    simulates = {"enable_precise_onboard": True, "precise_onboard_batch_size": batch}
    options = with_flags(options, scheduling_steps_ahead=num_ahead, greedy_prefill=True, **simulates)
    driver = make_quick_driver(options, seed)
    state = driver.state
    requests = make_requests(shapes, options.limits)
    while requests or driver.queue or state.queues.num_waiting:
        for request in [requests.pop(0) for _ in range(driver.rng.randint(0, 2)) if requests]:
            add_request(state, request)
        num_results = max(driver.rng.randint(0, 2), len(driver.queue) - num_ahead + 1)
        for message in [driver.queue.popleft() for _ in range(num_results) if driver.queue]:
            apply_output(state, driver.worker.forward(message, QUICK_STEP_SECONDS))
        release_ending(state)
        num_waiting = None
        while num_waiting != state.queues.num_waiting:
            num_waiting = state.queues.num_waiting
            admit_waiting(state)
        if num_waiting and state.slots.free and driver.rng.random() < 0.2:
            assert not can_be_admitted(state)
        while len(driver.queue) < num_ahead and (message := next_step(state)) is not None:
            driver.send(message)
    assert state.totals.preemptions == 0


@examples(300)
@given(
    shapes=shapes_strategy,
    options=options_strategy,
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 9),
    most=st.sampled_from([1, 3, 100]),
)
def test_a_batch_admits_as_many_sequences_as_fit_one_by_one(shapes, options, seed, batch, most):
    state, waiting = stop_halfway(shapes, options, seed)
    num_blocks = options.limits.num_kv_blocks
    candidates, kv_forecast = describe(state, waiting), forecast_kv(state, None)
    fits = [
        fits_together(kv_forecast.curve, simulate_candidates(candidates, num, kv_forecast), num_blocks)
        for num in range(1, len(waiting) + 1)
    ]
    assert fits == sorted(fits, reverse=True), "more sequences never need fewer blocks"
    assert num_fitting(candidates, 0, kv_forecast, num_blocks, batch, most) == min(sum(fits), most)


@examples(300)
@given(shapes=shapes_strategy, options=options_strategy, seed=st.integers(0, 2**32))
def test_simulated_candidates_equal_the_forecast_after_their_admission(shapes, options, seed):
    """The sum of the curves of running sequences and candidates equals the curve after the candidates' admission; it
    is higher if several candidates use one node of the tree to different depths."""
    options = dataclasses.replace(options, limits=EngineLimits(500, options.limits.page_size, 80))
    state, waiting = stop_halfway(shapes, options, seed)
    page_size, steps = options.limits.page_size, np.arange(400)
    before, candidates = forecast_kv(state, None), describe(state, waiting)
    sample_groups = {sample_group.start: sample_group for sample_group in candidates.sample_groups}
    steps_of_paths = {step for sample_group in candidates.sample_groups for step in sample_group.path}
    is_exact = len(steps_of_paths) == len({node for node, _ in steps_of_paths})
    for num, sequence in enumerate(waiting[: len(state.slots.free)], 1):
        if num - 1 in sample_groups:
            prompt = sequence.prompt
            match = state.blocks.tree.match(prompt.token_bytes, sequence.salt, (len(prompt) - 1) // page_size)
            assert match.num_blocks == sample_groups[num - 1].num_cached_blocks
        admit(state, state.queues.take_first_waiting())
        assert num_to_compute(state, [sequence]) == candidates.num_to_compute[num - 1]
        simulated = before.curve.at(steps) + simulate_candidates(candidates, num, before).at(steps)
        real = forecast_kv(state, None).curve.at(steps)
        assert (simulated >= real).all()
        assert not is_exact or simulated.tolist() == real.tolist()


@examples(200)
@given(shapes=shapes_strategy, options=options_strategy, seed=st.integers(0, 2**32))
def test_admitted_sequences_compute_as_many_tokens_as_described(shapes, options, seed):
    """This holds even if allocating their blocks evicts cached blocks."""
    state, waiting = stop_halfway(shapes, options, seed)
    candidates = describe(state, waiting)
    curve = forecast_kv(state, None).curve
    num = 0
    for more in range(1, min(len(waiting), len(state.slots.free)) + 1):
        extra = simulate_candidates(candidates, more, forecast_kv(state, None))
        num = more if fits_together(curve, extra, options.limits.num_kv_blocks) else num
    admit_described(state, candidates, num)
    assert state.queues.first_waiting(100) == waiting[num:]
    assert num_to_compute(state, waiting[:num]) == candidates.num_to_compute[:num].tolist()
    assert_each_block_has_one_owner(state)


def num_to_compute(state: EngineState, sequences: list[Sequence]) -> list[int]:
    """Prompt tokens that each running sequence has to compute."""
    slots, arrays = [sequence.slot for sequence in sequences], state.slots
    return (arrays.num_prefill_tokens[slots] - arrays.first_positions[slots]).tolist()


@pytest.mark.parametrize(("num_first", "num_second", "expected"), [(16, 24, [16, 16, 9, 9]), (17, 24, [17, 17, 9, 9])])
def test_candidates_reuse_prompt_logprobs_of_earlier_candidates(num_first, num_second, expected):
    """Two prompts, each of them twice, first with fewer top-k logprobs."""
    state = make_quick_driver(make_options(100, 4, max_seqs_per_forward=8)).state
    shapes = [Shape(0, num_tokens, 0, 1, 9, prompt_top=top) for num_tokens in (num_first, num_second) for top in (1, 2)]
    for request in make_requests(shapes, state.options.limits):
        add_request(state, request)
    waiting = state.queues.first_waiting(8)
    simulated = describe(state, waiting).num_to_compute.tolist()
    for _ in waiting:
        admit(state, state.queues.take_first_waiting())
    assert simulated == num_to_compute(state, waiting) == expected


def test_prompt_logprobs_are_recomputed_if_another_sample_is_admitted_first():
    """Another sample, preempted later, is readmitted before the sample that computes the prompt logprobs."""
    state = make_quick_driver(make_options(100, 4, max_seqs_per_forward=8)).state
    for request in make_requests([Shape(0, 30, 0, 2, 9, prompt_top=1)], state.options.limits):
        add_request(state, request)
    with_logprobs, sample = state.queues.take_first_waiting(), state.queues.take_first_waiting()
    for sequence in (with_logprobs, sample):
        state.queues.add_waiting(sequence, first=True)
    before, candidates = forecast_kv(state, None), describe(state, [sample, with_logprobs])
    simulated = simulate_candidates(candidates, 2, before).at(np.arange(60))
    for _ in range(2):
        admit(state, state.queues.take_first_waiting())
    assert state.slots.first_positions[[sample.slot, with_logprobs.slot]].tolist() == [0, 0]
    assert forecast_kv(state, None).curve.at(np.arange(60)).tolist() == simulated.tolist()


@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    max_new_tokens=st.integers(1, 20),
    page_size=st.integers(1, 5),
    num_blocks=st.integers(0, 40),
)
def test_sequences_obviously_fit_if_they_fit_without_sharing_blocks(prompts, max_new_tokens, page_size, num_blocks):
    shapes = [Shape(0, 0, num_tokens, 1, max_new_tokens) for num_tokens in prompts]
    options = make_options(100, page_size)
    state = make_quick_driver(options).state
    for request in make_requests(shapes, EngineLimits(100, page_size, 1000)):
        add_request(state, request)
    touched = [
        {(number, position // page_size) for position in range(num_tokens + max_new_tokens - 1)}
        for number, num_tokens in enumerate(prompts)
    ]
    expected = max(num for num in range(len(prompts) + 1) if len(set().union(*touched[:num])) <= num_blocks)
    candidates = describe(state, state.queues.first_waiting(100))
    assert num_obviously_fitting(candidates, num_blocks) == expected


def test_a_large_batch_admits_again_once_enough_sequences_have_left_or_after_a_few_steps(monkeypatch):
    monkeypatch.setattr(admission, "MAX_ADMITTED", 1000)
    options = make_options(2000, 1, max_tokens_per_forward=1024, max_seqs_per_forward=1024)
    driver = make_quick_driver(options)
    state = driver.state
    assert not can_admit(state)
    requests = make_requests([Shape(0, 0, 1, 1, 3, cache_salt=str(number)) for number in range(800)], options.limits)
    driver.step(requests)
    assert state.slots.num_running == 666, "as many as fit, with three blocks each"
    assert len(state.steps_in_flight) > 0
    assert not can_admit(state)
    for request in requests[: state.slots.num_running // RUNNING_PER_RELEASE]:
        assert not can_admit(state)
        cancel_request(state, request.request_id)
        release_cancelled(state)
    assert can_admit(state)
    state.slots.num_releases -= 1
    assert not can_admit(state)
    state.next_step_id += MAX_STEPS_BLOCKED
    assert can_admit(state)
    state.next_step_id -= MAX_STEPS_BLOCKED
    state.steps_in_flight.clear()
    assert can_admit(state), "the worker has nothing to do"


def test_a_step_admits_all_that_fit_although_each_search_adds_few():
    options = make_options(140, 1, max_tokens_per_forward=1024, max_seqs_per_forward=64, precise_onboard_batch_size=1)
    state = make_quick_driver(options).state
    for number in range(10):
        num_prompt, num_new = [(1, 20), (20, 1)][number % 2]
        add_request(state, make_request(number, num_prompt, 1, num_new, ignore_eos=True))
    assert options.limits.num_kv_blocks < 10 * (20 + 1), "not all can have their full length at the same time"
    admit_waiting(state)
    assert state.slots.num_running == 10
    assert state.admission.blocked_at is None
    add_request(state, make_request(10, 60, 1, 1, ignore_eos=True))
    admit_waiting(state)
    assert state.slots.num_running == 10
    assert state.admission.blocked_at is not None


def blocks_alone(num_kv_tokens: int, num_steps: int, steps: np.ndarray) -> list[int]:
    loads = SequenceLoads(np.array([num_kv_tokens]), np.zeros(1, np.int64), np.array([num_steps]))
    none = SharedLoads(*np.zeros((3, 0), np.int64))
    return simulate_kv(loads, none, 4, release_delay=0).at(steps).tolist()


@pytest.mark.parametrize(
    ("num_blocks", "num_by_bound", "calls_until_admitted"), [(8, 0, 5), (9, 0, 0), (10, 0, 0), (11, 1, 0)]
)
def test_the_example_of_the_architecture_page(num_blocks: int, num_by_bound: int, calls_until_admitted: int) -> None:
    page = (Path(__file__).parents[3] / "docs/architecture.md").read_text().partition("## What decides admission")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    steps, expected = np.array(rows[0][1:], np.int64), {row[0]: [int(cell) for cell in row[1:]] for row in rows[1:5]}
    driver = EngineDriver(make_options(num_blocks, 4, scheduling_steps_ahead=1, deferred_tasks="always"))
    driver.step([make_request(1, 6, 1, 5, ignore_eos=True), make_request(2, 7, 1, 14, ignore_eos=True)])
    state = driver.state
    add_request(state, make_request(3, 9, 1, 4, ignore_eos=True))
    candidates, running = describe(state, state.queues.first_waiting(1)), forecast_kv(state, None)
    own = simulate_candidates(candidates, 1, running)
    assert expected["A"] == blocks_alone(6, 4, steps)
    assert expected["B"] == blocks_alone(7, 13, steps)
    assert expected["C"] == own.at(steps).tolist()
    assert expected["all"] == (running.curve.at(steps) + own.at(steps)).tolist()
    num_free = num_blocks - state.blocks.num_used - admission._num_blocks_still_needed(state)
    assert num_obviously_fitting(candidates, num_free) == num_by_bound
    admit_waiting(state)
    num_calls, used = 0, [state.blocks.num_used]
    while driver.queue:
        if state.queues.num_waiting:
            num_calls += 1
        driver.step([], 1)
        used.append(state.blocks.num_used)
    assert num_calls == calls_until_admitted
    assert state.totals.preemptions == 0
    if calls_until_admitted == 0:
        assert [used[step] for step in steps] == expected["all"]
    else:
        assert max(used) == 7
