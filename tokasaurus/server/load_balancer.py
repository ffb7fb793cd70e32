"""Which data-parallel replica gets the next request."""

from collections.abc import Sequence


def choose_replica(num_unfinished_sequences: Sequence[int]) -> int:
    """The replica with the fewest unfinished sequences; the first of those that tie."""
    return min(range(len(num_unfinished_sequences)), key=num_unfinished_sequences.__getitem__)
