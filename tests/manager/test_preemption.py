"""Who is put back, against sorting and counting by hand; and how those who were come back."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.bench import (
    NEVER_LEARNS,
    Bench,
    EndsNext,
    Shape,
    assert_equals_simulation,
    make_options,
    make_requests,
)
from tests.manager.fake_worker import make_request
from tests.manager.holdings_check import assert_each_block_has_one_place, block_table
from tokasaurus.manager.holdings import put_back, sampled_tokens
from tokasaurus.manager.preemption import choose_victims
from tokasaurus.manager.sequence import Phase, Sequence
from tokasaurus.manager.turn import preempt
from tokasaurus.messages.generation import GenerateRequest


def victims_by_hand(costs: list[tuple[int, int, int]], num_short: int) -> list[int]:
    """costs: (tokens lost, blocks freed, order of admission) of each. Places of those to put back, the newest first."""
    victims: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place][0], -costs[place][2])):
        if sum(costs[victim][1] for victim in victims) < num_short and costs[place][1] > 0:
            victims.append(place)
    return sorted(victims, key=lambda place: -costs[place][2])


@settings(max_examples=500)
@given(
    costs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=10),
    order=st.permutations(range(10)),
    num_short=st.integers(1, 12),
)
def test_the_cheapest_are_chosen_and_no_more_than_needed(costs, order, num_short):
    costs = [(lost, freed, order[place]) for place, (lost, freed) in enumerate(costs)]
    columns = np.array(costs, np.int64).reshape(-1, 3).T
    assert choose_victims(*columns, num_short).tolist() == victims_by_hand(costs, num_short)


def cost_by_hand(bench: Bench, sequence: Sequence) -> tuple[int, int, int]:
    """What is lost and what comes free when a sequence is put back, from the block tables of all."""
    slots, page_size = bench.state.slots, bench.options.limits.page_size
    num_users = Counter(block for other in bench.running() for block in block_table(bench.state, other))
    alone = [place for place, block in enumerate(block_table(bench.state, sequence)) if num_users[block] == 1]
    positions = range(int(slots.num_kv_tokens[sequence.slot]) if sequence.is_open else 0)
    num_lost = sum(position // page_size in alone for position in positions)
    num_freed = 0 if sequence.phase is Phase.DRAINING else len(alone)
    return num_lost, num_freed, int(slots.admitted_at[sequence.slot])


def make_crowd(seed: int) -> tuple[Bench, list[GenerateRequest]]:
    """An engine short of blocks, some steps after its start, and its requests."""
    rng = random.Random(seed)
    options = make_options(
        rng.randint(16, 40),
        max_tokens_per_forward=rng.randint(6, 30),
        max_seqs_per_forward=rng.randint(3, 12),
        max_steps_ahead=rng.choice([1, 3, 8]),
        early_stopping=NEVER_LEARNS,
    )
    bench = Bench(options, forecast=EndsNext(), rng=rng)
    shapes = [
        Shape(rng.randint(0, 1), rng.randint(0, 16), rng.randint(0, 4), rng.randint(1, 3), 20, ignore_eos=False)
        for _ in range(6)
    ]
    requests = make_requests(shapes, options.limits)
    bench.turn(requests)
    for _ in range(rng.randint(0, 25)):
        bench.turn([], rng.randint(0, 2))
    return bench, requests


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32), num_short=st.integers(1, 8))
def test_whoever_loses_least_is_put_back_in_front_of_all_that_wait(seed, num_short):
    bench, requests = make_crowd(seed)
    state, running = bench.state, bench.running()
    costs = [cost_by_hand(bench, sequence) for sequence in running]
    places = victims_by_hand(costs, num_short)
    waiting, num_available = state.queues.first_waiting(100), state.blocks.num_available
    num_before = state.totals.preemptions
    preempt(state, num_short)
    victims = [running[place] for place in reversed(places)]
    assert state.queues.first_waiting(100) == [*victims, *waiting], "in the order in which they had been admitted"
    assert state.totals.preemptions == num_before + len(victims)
    assert state.blocks.num_available >= num_available + sum(costs[place][1] for place in places)
    assert_each_block_has_one_place(state)
    bench.turn()
    bench.run_until_idle()
    assert_equals_simulation(bench.deltas, requests)
    assert len(bench.deltas) == sum(request.num_sequences for request in requests)


@pytest.mark.parametrize("num_turns", range(0, 28, 3))
def test_whoever_comes_back_finds_its_tokens_in_the_cache(num_turns):
    """Put back while it prefills, in chunks of 10, and while it decodes: what was computed in whole blocks is read."""
    request = make_request(1, 45, 1, 30, ignore_eos=True, want_logprobs=True)
    bench = Bench(make_options(40, max_tokens_per_forward=10), (0.01,))
    bench.turn([request])
    for _ in range(num_turns):
        bench.turn([], 1)
    (sequence,) = bench.running()
    state = bench.state
    num_kv_tokens = int(state.slots.num_kv_tokens[sequence.slot])
    num_known = 45 + len(sampled_tokens(state, sequence))
    put_back(state, sequence)
    assert state.blocks.num_used == 0
    bench.turn()
    start = (min(num_kv_tokens, num_known - 1)) // 4 * 4
    assert bench.worker.opened == [(1, 0)] * len(bench.worker.opened)
    bench.run_until_idle()
    assert bench.worker.start_positions == [0, start]
    assert_equals_simulation(bench.deltas, [request])
    assert [delta.num_cached_tokens for delta in bench.deltas] == [0], "as it was when it first started"
    stats = state.stats()
    assert (stats.total_preemptions, stats.total_preempted_tokens) == (1, num_kv_tokens - start)
    assert stats.total_generation_tokens == 30
    assert (stats.total_prompt_tokens, stats.total_prefix_cache_hit_tokens) == (45, 0)


def test_little_is_computed_twice_where_preemption_is_constant():
    """All samples of one prompt at once: what they hold alone is little, and most of it is still there on return."""
    bench = Bench(
        make_options(30, max_tokens_per_forward=60, max_seqs_per_forward=16, early_stopping=NEVER_LEARNS),
        (0.01,),
        forecast=EndsNext(),
    )
    request = make_request(3, 30, 16, 40)
    bench.turn([request])
    bench.run_until_idle(1)
    assert_equals_simulation(bench.deltas, [request])
    stats = bench.state.stats()
    assert stats.total_preemptions > 10
    num_returns = len(bench.worker.opened) - len(set(bench.worker.opened))
    assert num_returns > 10
    assert stats.total_preempted_tokens < 8 * num_returns, "two blocks at most, of ten to eighteen"
