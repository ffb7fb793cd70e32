"""Tests which sequences are preempted, against plain sorting and counting, and how they continue."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner, block_table
from tests.manager.helpers.engine_driver import NEVER_LEARNS, EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation
from tokasaurus.manager.engine.admission import admit_waiting
from tokasaurus.manager.engine.engine import make_room, next_step
from tokasaurus.manager.engine.lifecycle import preempt, sampled_tokens
from tokasaurus.manager.engine.outputs import apply_output, release_ending
from tokasaurus.manager.engine.requests import add_request
from tokasaurus.manager.planning.step_budget import choose_victims
from tokasaurus.manager.state.sequence import Phase, Sequence


def expected_victims(costs: list[tuple[int, int, int]], num_short: int) -> list[int]:
    """Indices of the sequences to preempt, newest first.

    costs: (tokens lost, blocks freed, order of admission) of each sequence."""
    victims: list[int] = []
    for index in sorted(range(len(costs)), key=lambda index: (costs[index][0], -costs[index][2])):
        if sum(costs[victim][1] for victim in victims) < num_short and costs[index][1] > 0:
            victims.append(index)
    return sorted(victims, key=lambda index: -costs[index][2])


@examples(500)
@given(
    costs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=10),
    order=st.permutations(range(10)),
    num_short=st.integers(1, 12),
)
def test_choose_victims_picks_the_cheapest_and_no_more_than_needed(costs, order, num_short):
    costs = [(lost, freed, order[index]) for index, (lost, freed) in enumerate(costs)]
    columns = np.array(costs, np.int64).reshape(-1, 3).T
    assert choose_victims(*columns, num_short).tolist() == expected_victims(costs, num_short)


def needs_block(driver: EngineDriver, sequence: Sequence) -> bool:
    """Whether the next step of a sequence needs a block that it does not have."""
    num_kv_tokens = int(driver.state.slots.num_kv_tokens[sequence.slot])
    num_covered = driver.options.limits.page_size * len(block_table(driver.state, sequence))
    return sequence.phase is Phase.DECODE and num_kv_tokens == num_covered


def expected_cost(driver: EngineDriver, sequence: Sequence) -> tuple[int, int, int]:
    """(tokens lost, blocks freed, order of admission) if a sequence is preempted, from all block tables."""
    slots, page_size = driver.state.slots, driver.options.limits.page_size
    num_users = Counter(block for other in driver.running() for block in block_table(driver.state, other))
    alone = [index for index, block in enumerate(block_table(driver.state, sequence)) if num_users[block] == 1]
    positions = range(int(slots.num_kv_tokens[sequence.slot]) if sequence.is_open else 0)
    num_lost = sum(position // page_size in alone for position in positions)
    num_freed = 0 if sequence.phase is Phase.DRAINING else len(alone) + needs_block(driver, sequence)
    return num_lost, num_freed, int(slots.admitted_at[sequence.slot])


def expected_num_short(driver: EngineDriver) -> int:
    running = driver.running()
    used = {block for sequence in running for block in block_table(driver.state, sequence)}
    return sum(needs_block(driver, sequence) for sequence in running) - (driver.state.blocks.num_blocks - len(used))


def test_the_cheapest_sequences_are_preempted_and_then_wait_first_in_line():
    num_checked = 0

    @examples(120, 10)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        nonlocal num_checked
        rng = random.Random(seed)
        options = make_options(
            rng.randint(16, 40),
            max_tokens_per_forward=rng.randint(6, 30),
            max_seqs_per_forward=rng.randint(3, 12),
            scheduling_steps_ahead=rng.choice([1, 3, 8]),
            **NEVER_LEARNS,
        )
        driver = EngineDriver(options, forecast=EndsNext(), rng=rng)
        shapes = [
            Shape(rng.randint(0, 1), rng.randint(0, 16), rng.randint(0, 4), rng.randint(1, 3), 30, ignore_eos=False)
            for _ in range(6)
        ]
        requests = make_requests(shapes, options.limits)
        state = driver.state
        for request in requests:
            add_request(state, request)
        while state.unfinished:
            for _ in range(max(rng.randint(0, 2), len(driver.queue) - options.config.scheduling_steps_ahead + 1)):
                if driver.queue:
                    apply_output(state, driver.worker.forward(driver.queue.popleft()))
            release_ending(state)
            admit_waiting(state)
            num_short = expected_num_short(driver)
            if num_short > 0:
                running, waiting = driver.running(), state.queues.first_waiting(100)
                indices = expected_victims([expected_cost(driver, sequence) for sequence in running], num_short)
                num_before = state.totals.preemptions
                make_room(state)
                victims = [running[index] for index in reversed(indices)]
                assert state.queues.first_waiting(100) == [*victims, *waiting], (
                    "victims wait first, in the order of their admission"
                )
                assert state.totals.preemptions == num_before + len(victims)
                assert expected_num_short(driver) <= 0
                assert_each_block_has_one_owner(state)
                num_checked += 1
            message = next_step(state)
            if message is not None:
                driver.send(message)
        driver.run_until_idle()
        driver.deltas += state.deltas
        assert_equals_simulation(driver.deltas, requests)
        assert len(driver.deltas) == sum(request.num_sequences for request in requests)

    check()
    assert num_checked > (100 if IS_NIGHTLY else 50)


@pytest.mark.parametrize("num_steps", range(0, 28, 3))
def test_a_readmitted_sequence_reads_its_blocks_from_the_prefix_tree(num_steps):
    """It is preempted during prefill, in chunks of 10, or decode; then it reads every whole block that it computed."""
    request = make_request(1, 45, 1, 30, ignore_eos=True, want_logprobs=True)
    driver = EngineDriver(make_options(40, max_tokens_per_forward=10), (0.01,))
    driver.step([request])
    for _ in range(num_steps):
        driver.step([], 1)
    (sequence,) = driver.running()
    state = driver.state
    num_kv_tokens = int(state.slots.num_kv_tokens[sequence.slot])
    num_known = 45 + len(sampled_tokens(state, sequence))
    preempt(state, sequence)
    assert state.blocks.num_used == 0
    driver.step()
    start = min(min(num_kv_tokens, num_known) // 4 * 4, num_known - 1)
    assert driver.worker.opened == [(1, 0)] * len(driver.worker.opened)
    driver.run_until_idle()
    assert driver.worker.start_positions == [0, start]
    assert_equals_simulation(driver.deltas, [request])
    assert [delta.num_cached_tokens for delta in driver.deltas] == [0], "as at its first admission"
    stats = state.stats()
    assert (stats.total_preemptions, stats.total_recomputed_tokens) == (1, num_kv_tokens - start)
    assert stats.total_generation_tokens == 30
    assert (stats.total_prompt_tokens, stats.total_prefix_cache_hit_tokens) == (45, 0)


def test_constant_preemption_recomputes_few_tokens():
    """All samples have one prompt: few blocks belong to a single sample, and most are still cached at readmission."""
    driver = EngineDriver(
        make_options(30, max_tokens_per_forward=60, max_seqs_per_forward=16, **NEVER_LEARNS),
        (0.01,),
        forecast=EndsNext(),
    )
    request = make_request(3, 30, 16, 40)
    driver.step([request])
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, [request])
    stats = driver.state.stats()
    assert stats.total_preemptions > 10
    num_readmissions = len(driver.worker.opened) - len(set(driver.worker.opened))
    assert num_readmissions > 10
    assert stats.total_recomputed_tokens < 8 * num_readmissions, "at most two blocks each, of ten to eighteen"
