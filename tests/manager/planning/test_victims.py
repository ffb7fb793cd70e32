"""Which sequences are preempted, against sorting and counting by hand; and how they continue."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner, block_table
from tests.manager.helpers.engine_driver import NEVER_LEARNS, EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation
from tokasaurus.manager.engine.admission import admit_waiting
from tokasaurus.manager.engine.engine import make_room, next_step
from tokasaurus.manager.engine.lifecycle import preempt, sampled_tokens
from tokasaurus.manager.engine.outputs import apply_output
from tokasaurus.manager.engine.requests import add_request
from tokasaurus.manager.planning.victims import choose_victims
from tokasaurus.manager.state.sequence import Phase, Sequence


def victims_by_hand(costs: list[tuple[int, int, int]], num_short: int) -> list[int]:
    """costs: (tokens lost, blocks freed, order of admission) of each. Indices of those to preempt, the newest first."""
    victims: list[int] = []
    for index in sorted(range(len(costs)), key=lambda index: (costs[index][0], -costs[index][2])):
        if sum(costs[victim][1] for victim in victims) < num_short and costs[index][1] > 0:
            victims.append(index)
    return sorted(victims, key=lambda index: -costs[index][2])


@settings(max_examples=500)
@given(
    costs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=10),
    order=st.permutations(range(10)),
    num_short=st.integers(1, 12),
)
def test_the_cheapest_are_chosen_and_no_more_than_needed(costs, order, num_short):
    costs = [(lost, freed, order[index]) for index, (lost, freed) in enumerate(costs)]
    columns = np.array(costs, np.int64).reshape(-1, 3).T
    assert choose_victims(*columns, num_short).tolist() == victims_by_hand(costs, num_short)


def needs_block(driver: EngineDriver, sequence: Sequence) -> bool:
    """Whether the next step of a sequence begins a block that it does not have."""
    num_kv_tokens = int(driver.state.slots.num_kv_tokens[sequence.slot])
    num_covered = driver.options.limits.page_size * len(block_table(driver.state, sequence))
    return sequence.phase is Phase.DECODE and num_kv_tokens == num_covered


def cost_by_hand(driver: EngineDriver, sequence: Sequence) -> tuple[int, int, int]:
    """What is lost and what is won when a sequence is preempted, from the block tables of all."""
    slots, page_size = driver.state.slots, driver.options.limits.page_size
    num_users = Counter(block for other in driver.running() for block in block_table(driver.state, other))
    alone = [index for index, block in enumerate(block_table(driver.state, sequence)) if num_users[block] == 1]
    positions = range(int(slots.num_kv_tokens[sequence.slot]) if sequence.is_open else 0)
    num_lost = sum(position // page_size in alone for position in positions)
    num_won = 0 if sequence.phase is Phase.DRAINING else len(alone) + needs_block(driver, sequence)
    return num_lost, num_won, int(slots.admitted_at[sequence.slot])


def num_short_by_hand(driver: EngineDriver) -> int:
    running = driver.running()
    used = {block for sequence in running for block in block_table(driver.state, sequence)}
    return sum(needs_block(driver, sequence) for sequence in running) - (driver.state.blocks.num_blocks - len(used))


def test_the_cheapest_sequences_are_preempted_and_wait_in_front_of_all():
    num_checked = 0

    @settings(max_examples=120)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        nonlocal num_checked
        rng = random.Random(seed)
        options = make_options(
            rng.randint(16, 40),
            max_tokens_per_forward=rng.randint(6, 30),
            max_seqs_per_forward=rng.randint(3, 12),
            max_steps_ahead=rng.choice([1, 3, 8]),
            early_stopping=NEVER_LEARNS,
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
            for _ in range(max(rng.randint(0, 2), len(driver.queue) - options.max_steps_ahead + 1)):
                if driver.queue:
                    apply_output(state, driver.worker.forward(driver.queue.popleft()))
            admit_waiting(state)
            num_short = num_short_by_hand(driver)
            if num_short > 0:
                running, waiting = driver.running(), state.queues.first_waiting(100)
                indices = victims_by_hand([cost_by_hand(driver, sequence) for sequence in running], num_short)
                num_before = state.totals.preemptions
                make_room(state)
                victims = [running[index] for index in reversed(indices)]
                assert state.queues.first_waiting(100) == [*victims, *waiting], "in the order of their admission"
                assert state.totals.preemptions == num_before + len(victims)
                assert num_short_by_hand(driver) <= 0
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
    assert num_checked > 100


@pytest.mark.parametrize("num_steps_deferred", range(0, 28, 3))
def test_a_preempted_sequence_finds_its_tokens_in_the_cache(num_steps_deferred):
    """Preempted while it prefills in chunks of 10, and while it decodes: whole blocks that it computed are read."""
    request = make_request(1, 45, 1, 30, ignore_eos=True, want_logprobs=True)
    driver = EngineDriver(make_options(40, max_tokens_per_forward=10), (0.01,))
    driver.step([request])
    for _ in range(num_steps_deferred):
        driver.step([], 1)
    (sequence,) = driver.running()
    state = driver.state
    num_kv_tokens = int(state.slots.num_kv_tokens[sequence.slot])
    num_known = 45 + len(sampled_tokens(state, sequence))
    preempt(state, sequence)
    assert state.blocks.num_used == 0
    driver.step()
    start = (min(num_kv_tokens, num_known - 1)) // 4 * 4
    assert driver.worker.opened == [(1, 0)] * len(driver.worker.opened)
    driver.run_until_idle()
    assert driver.worker.start_positions == [0, start]
    assert_equals_simulation(driver.deltas, [request])
    assert [delta.num_cached_tokens for delta in driver.deltas] == [0], "as it was when it first started"
    stats = state.stats()
    assert (stats.total_preemptions, stats.total_recomputed_tokens) == (1, num_kv_tokens - start)
    assert stats.total_generation_tokens == 30
    assert (stats.total_prompt_tokens, stats.total_prefix_cache_hit_tokens) == (45, 0)


def test_little_is_computed_twice_where_preemption_is_constant():
    """All samples of one prompt at once: few blocks belong to one sample alone, and most are still cached later."""
    driver = EngineDriver(
        make_options(30, max_tokens_per_forward=60, max_seqs_per_forward=16, early_stopping=NEVER_LEARNS),
        (0.01,),
        forecast=EndsNext(),
    )
    request = make_request(3, 30, 16, 40)
    driver.step([request])
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, [request])
    stats = driver.state.stats()
    assert stats.total_preemptions > 10
    num_returns = len(driver.worker.opened) - len(set(driver.worker.opened))
    assert num_returns > 10
    assert stats.total_recomputed_tokens < 8 * num_returns, "two blocks at most, of ten to eighteen"
