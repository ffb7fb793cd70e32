"""Chooses the data-parallel replica for the next request, and decides whether the queue is full."""

from collections.abc import Iterable, Sequence
from itertools import islice


def choose_replica(num_unfinished_sequences: Sequence[int]) -> int:
    """The index of the replica with the fewest unfinished sequences; the first if several tie."""
    return min(range(len(num_unfinished_sequences)), key=num_unfinished_sequences.__getitem__)


def is_queue_full(unfinished_newest_first: Iterable[int], num_waiting: int, max_queued: int) -> bool:
    """Whether at least `max_queued` requests are waiting with all of their sequences.

    unfinished_newest_first: number of unfinished sequences of each pending request. num_waiting: number of all these
    sequences that are not running. Requests start in the order of their arrival, so the newest ones wait.
    """
    newest = list(islice(unfinished_newest_first, max_queued))
    return len(newest) == max_queued and sum(newest) <= num_waiting
