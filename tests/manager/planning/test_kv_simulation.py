"""Tests simulated block usage against a replay of every step."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.planning.kv_simulation import (
    SequenceLoads,
    SharedLoads,
    UsageCurve,
    fits_together,
    join_loads,
    simulate_kv,
    window_loads,
)
from tokasaurus.messages.status import WindowGroups

PAGE_SIZES = st.sampled_from([1, 4, 7, 16])
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 1, 2, 7, 19]), st.integers(0, 25)), max_size=8
)
SHARED = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 30)), max_size=4)

Sequences = list[tuple[int, int, int]]
"""Per sequence: (tokens now, steps before it decodes, decode steps)."""
SharedRuns = list[tuple[int, int, int]]
"""Per run of shared blocks: (blocks, first step, steps after the first)."""


def make_loads(sequences: Sequences) -> SequenceLoads:
    return SequenceLoads(*np.array(sequences, np.int64).reshape(-1, 3).T)


def make_shared(runs: SharedRuns) -> SharedLoads:
    num_blocks, first_steps, num_more = np.array(runs, np.int64).reshape(-1, 3).T
    return SharedLoads(num_blocks, first_steps, first_steps + num_more)


def simulate(sequences: Sequences, runs: SharedRuns, page_size: int, release_delay: int) -> UsageCurve:
    return simulate_kv(make_loads(sequences), make_shared(runs), page_size, release_delay)


def replay(sequences: Sequences, runs: SharedRuns, page_size: int, release_delay: int) -> list[int]:
    """Blocks in use after 0, 1, 2, ... steps, from each sequence's token count; the last entry is zero."""
    num_tokens = [tokens for tokens, _, _ in sequences]
    usage = []
    while not usage or usage[-1] > 0 or len(usage) < 120:
        now = len(usage)
        if now > 0:
            for index, (_, start, num_steps) in enumerate(sequences):
                if start < now <= start + num_steps:
                    num_tokens[index] += 1
        in_use = 0
        for index, (_, start, num_steps) in enumerate(sequences):
            if now <= start + num_steps + release_delay:
                in_use += len(range(0, num_tokens[index], page_size))
        for num_blocks, first, num_more in runs:
            if first <= now <= first + num_more:
                in_use += num_blocks
        usage.append(in_use)
    return usage


@examples(600)
@given(SEQUENCES, SHARED, PAGE_SIZES, st.integers(0, 9))
def test_usage_equals_a_replay_of_every_step(sequences, runs, page_size, release_delay):
    expected = replay(sequences, runs, page_size, release_delay)

    curve = simulate(sequences, runs, page_size, release_delay)

    assert curve.at(np.arange(len(expected))).tolist() == expected
    assert curve.peak == max(expected)
    assert curve.blocks.tolist() == [expected[step] for step in curve.steps]
    assert curve.at(np.array([10**6, 0], np.int64)).tolist() == [0, expected[0]]


@examples(500)
@given(SEQUENCES, SHARED, PAGE_SIZES, st.integers(0, 9))
def test_breakpoints_increase_and_include_every_step_before_usage_falls(sequences, runs, page_size, release_delay):
    expected = replay(sequences, runs, page_size, release_delay)

    steps = simulate(sequences, runs, page_size, release_delay).steps.tolist()

    assert steps == sorted(set(steps))
    falls = {now for now, (before, after) in enumerate(pairwise(expected)) if after < before}
    assert falls <= set(steps)


@examples(600)
@given(SEQUENCES, SEQUENCES, SHARED, SHARED, PAGE_SIZES, st.integers(0, 9))
def test_two_curves_fit_together_exactly_if_the_peak_of_their_sum_fits(
    base, extra, base_runs, extra_runs, page_size, release_delay
):
    replays = replay(base, base_runs, page_size, release_delay), replay(extra, extra_runs, page_size, release_delay)
    # Both replays end with zeros, so they may differ in length.
    peak = max([sum(pair) for pair in zip(*replays, strict=False)] + replays[0] + replays[1])
    base_curve = simulate(base, base_runs, page_size, release_delay)
    extra_curve = simulate(extra, extra_runs, page_size, release_delay)

    assert fits_together(base_curve, extra_curve, peak)
    assert fits_together(extra_curve, base_curve, peak)
    assert not fits_together(base_curve, extra_curve, peak - 1)
    assert not fits_together(extra_curve, base_curve, peak - 1)


@examples(400)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 2, 9]), st.integers(0, 25)), max_size=6),
    st.sampled_from([WindowGroups(1, 4), WindowGroups(3, 9), WindowGroups(2, -6), WindowGroups(5, 1)]),
    PAGE_SIZES,
    st.integers(0, 9),
)
def test_what_layers_with_windows_keep_grows_to_the_window_and_stays_until_the_end(
    sequences, groups, page_size, release_delay
):
    loads = make_loads(sequences)
    kept = window_loads(groups, page_size, loads.num_tokens, loads.start_steps, loads.num_steps)

    curve = simulate_kv(join_loads(loads, kept), make_shared([]), page_size, release_delay)

    most = page_size * groups.num_held(page_size)
    expected = []
    for now in range(80):
        used = 0
        for tokens, start, steps in sequences:
            if now <= start + steps + release_delay:
                in_all = tokens + min(max(now - start, 0), steps)
                kept_now = min(tokens, most) + min(max(now - start, 0), steps)
                used += len(range(0, in_all, page_size))
                used += groups.num_groups * len(range(0, min(kept_now, most), page_size))
        expected.append(used)
    assert curve.at(np.arange(80)).tolist() == expected
    assert curve.peak == max(expected)


def test_thousands_of_sequences_over_thousands_of_steps_equal_a_closed_form():
    random = np.random.default_rng(0)
    loads = SequenceLoads(
        random.integers(0, 4000, 3000), random.integers(0, 300, 3000) // 100 * 50, random.integers(0, 3000, 3000)
    )
    runs = SharedLoads(random.integers(0, 90, 200), random.integers(0, 50, 200), random.integers(50, 3000, 200))
    ends = loads.start_steps + loads.num_steps
    expected = []
    for now in range(0, 3200, 23):
        num_tokens = loads.num_tokens + np.clip(now - loads.start_steps, 0, loads.num_steps)
        own = np.ceil(num_tokens / 16)[now <= ends + 8].sum()
        shared = runs.num_blocks[(runs.first_steps <= now) & (now <= runs.last_steps)].sum()
        expected.append(int(own + shared))

    assert simulate_kv(loads, runs, 16, 8).at(np.arange(0, 3200, 23)).tolist() == expected
