"""When a waiting sequence fits, against a search that tries each step and looks at each later one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.planning.first_fit import first_fitting_step


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
    none = np.zeros(0, np.int64)
    assert first_fitting_step(used, np.array([2, 2]), none, none, 8) == 0
    assert first_fitting_step(used, np.array([2, 2, 2, 2, 2, 2]), none, none, 8) == 7
    assert first_fitting_step(used, np.array([0, 0, 0, 0, 7]), none, none, 8) == 3, "it is large after the peak"
    assert first_fitting_step(used, np.array([9]), none, none, 8) is None
