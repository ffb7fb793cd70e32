"""Admission against a count of every combination."""

from hypothesis import given
from hypothesis import strategies as st

from tests.manager.fake_worker import make_request
from tokasaurus.manager.admission import choose_admissions
from tokasaurus.manager.sequence import make_sequence

PAGE_SIZE = 4


def blocks_by_writing(num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Blocks touched when every token but the last sampled one is written to its place."""
    return len({position // PAGE_SIZE for position in range(num_prompt_tokens + max_new_tokens - 1)})


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=10),
    num_free_slots=st.integers(0, 6),
    num_free_blocks=st.integers(0, 40),
)
def test_the_longest_head_that_fits_is_admitted(sizes, num_free_slots, num_free_blocks):
    waiting = [
        make_sequence(make_request(number, *size[:1], max_new_tokens=size[1]), 0, PAGE_SIZE, frozenset(), None)
        for number, size in enumerate(sizes)
    ]
    needs = [blocks_by_writing(*size) for size in sizes]
    heads = range(min(len(sizes), num_free_slots) + 1)
    longest = max(length for length in heads if sum(needs[:length]) <= num_free_blocks)
    assert choose_admissions(waiting, num_free_slots, num_free_blocks) == waiting[:longest]
