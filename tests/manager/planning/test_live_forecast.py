"""Points of a usage curve, against the curve at every step; and when a waiting sequence fits, against a search that
tries each step and looks at each later one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.planning.kv_simulation import SequenceLoads, SharedLoads, simulate_kv
from tokasaurus.manager.planning.live_forecast import curve_points, first_fitting_step

NONE = np.zeros(0, np.int64)


def random_curve(seed: int, num_sequences: int, max_steps: int):
    rng = np.random.default_rng(seed)
    loads = SequenceLoads(*(rng.integers(0, high, num_sequences) for high in (200, 20, max_steps)))
    shared = SharedLoads(*(rng.integers(1, 9, 3), rng.integers(0, 5, 3), rng.integers(5, max_steps, 3)))
    return simulate_kv(loads, shared, 4, release_delay=int(rng.integers(0, 8)))


@pytest.mark.parametrize("seed", range(20))
def test_few_points_are_all_ends_of_spans_and_the_curve_falls_between_none(seed: int) -> None:
    curve = random_curve(seed, num_sequences=12, max_steps=300)
    steps, blocks = curve_points(curve, 240)
    assert (steps[0], blocks[-1]) == (0, 0)
    every = curve.at(np.arange(steps[-1] + 50))
    assert not every[steps[-1] :].any()
    assert blocks.tolist() == every[steps].tolist()
    for start, end in itertools.pairwise(steps):
        inside = every[start : end + 1]
        assert end == start + 1 or (np.diff(inside) >= 0).all()
        between = np.interp(np.arange(start, end + 1), steps, blocks)
        # A span's sequences allocate a block every few steps each, so the way up is nearly straight.
        assert end == start + 1 or np.abs(between - inside).max() <= 12


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_points", [4, 31, 240])
def test_of_too_many_points_the_highest_and_lowest_of_each_part_of_the_time_stay(seed: int, max_points: int) -> None:
    curve = random_curve(seed, num_sequences=800, max_steps=3000)
    all_steps, all_blocks = curve_points(curve, 1 << 30)
    steps, blocks = curve_points(curve, max_points)
    assert len(all_steps) > 240 >= len(steps)
    assert len(steps) <= max_points
    assert (np.diff(steps) > 0).all()
    assert (steps[0], steps[-1], blocks[-1]) == (0, all_steps[-1], 0)
    assert blocks.tolist() == curve.at(steps).tolist()
    assert blocks.max() == curve.peak
    num_parts = (max_points - 2) // 2
    part_of, part_of_kept = (values * num_parts // (all_steps[-1] + 1) for values in (all_steps, steps))
    for part in range(num_parts):
        whole = all_blocks[part_of == part]
        if len(whole):
            kept = blocks[part_of_kept == part]
            assert (kept.max(), kept.min()) == (whole.max(), whole.min())


def test_a_curve_without_sequences_is_a_zero() -> None:
    empty = SequenceLoads(NONE, NONE, NONE)
    steps, blocks = curve_points(simulate_kv(empty, SharedLoads(NONE, NONE, NONE), 4, 0), 240)
    assert (steps.tolist(), blocks.tolist()) == ([0], [0])


def fits_at(step, used, own, shared, num_blocks):
    """Whether the sequence can be admitted at `step`, by counting the blocks in use at each step until it has ended."""
    for age, blocks in enumerate(own):
        now = step + age
        in_use = blocks + (used[now] if now < len(used) else 0)
        in_use += sum(number for number, last_step in shared if now > last_step)
        if in_use > num_blocks:
            return False
    return True


def try_each_step(used, own, shared, num_blocks, earliest):
    last = max(earliest, len(used))
    return next((step for step in range(earliest, last + 1) if fits_at(step, used, own, shared, num_blocks)), None)


@examples(2000, 100)
@given(
    used=st.lists(st.integers(0, 12), max_size=24),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    shared=st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 23)), max_size=3),
    num_blocks=st.integers(1, 16),
    earliest=st.integers(0, 30),
)
def test_the_first_fitting_step_equals_that_of_a_search_through_all(used, steps, shared, num_blocks, earliest):
    own = np.cumsum(steps)
    shared = [(number, min(last_step, len(used) - 1)) for number, last_step in shared]
    found = first_fitting_step(
        np.array(used, np.int64),
        own,
        np.array([number for number, _ in shared], np.int64),
        np.array([last_step for _, last_step in shared], np.int64),
        num_blocks,
        earliest,
    )
    assert found == try_each_step(used, own.tolist(), shared, num_blocks, earliest)


def test_a_short_sequence_fits_before_a_peak_that_a_long_one_must_wait_for():
    used = np.array([2, 3, 4, 5, 6, 7, 8, 1, 1], np.int64)
    assert first_fitting_step(used, np.array([2, 2]), NONE, NONE, 8) == 0
    assert first_fitting_step(used, np.array([2, 2, 2, 2, 2, 2]), NONE, NONE, 8) == 7
    assert first_fitting_step(used, np.array([0, 0, 0, 0, 7]), NONE, NONE, 8) == 3, "it is large after the peak"
    assert first_fitting_step(used, np.array([9]), NONE, NONE, 8) is None
