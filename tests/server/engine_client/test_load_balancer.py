"""When the queue is full, computed from the numbers of unfinished and running sequences."""

from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.server.engine_client.load_balancer import is_queue_full


@given(unfinished=st.lists(st.integers(1, 5), max_size=8), num_running=st.integers(0, 45), max_queued=st.integers(1, 6))
def test_a_request_is_queued_while_none_of_its_sequences_runs(
    unfinished: list[int], num_running: int, max_queued: int
) -> None:
    """Oracle: list the request index of every sequence in order; the first `num_running` entries run."""
    row = [request for request, count in enumerate(unfinished) for _ in range(count)]
    queued = set(row) - set(row[:num_running])
    assert is_queue_full(reversed(unfinished), len(row) - num_running, max_queued) == (len(queued) >= max_queued)
