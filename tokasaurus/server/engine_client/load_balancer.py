"""Chooses the data-parallel replica for the next request."""

from collections.abc import Sequence


def choose_replica(num_unfinished_sequences: Sequence[int]) -> int:
    """The index of the replica with the fewest unfinished sequences; the first if several tie."""
    return min(range(len(num_unfinished_sequences)), key=num_unfinished_sequences.__getitem__)
