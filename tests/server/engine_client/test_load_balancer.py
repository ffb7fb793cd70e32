"""Which replica gets the next request."""

from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.server.engine_client.load_balancer import choose_replica


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_first_replica_with_the_fewest_sequences_is_chosen(num_unfinished: list[int]) -> None:
    fewest, index = min((count, index) for index, count in enumerate(num_unfinished))
    assert choose_replica(num_unfinished) == index
    assert num_unfinished[index] == fewest
