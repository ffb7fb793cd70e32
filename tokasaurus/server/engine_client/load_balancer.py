"""Which data-parallel replica gets the next request, and whether any may."""

from collections.abc import Iterable, Sequence
from itertools import islice


def choose_replica(num_unfinished_sequences: Sequence[int]) -> int:
    """The replica with the fewest unfinished sequences; the first of those that tie."""
    return min(range(len(num_unfinished_sequences)), key=num_unfinished_sequences.__getitem__)


def is_queue_full(unfinished_newest_first: Iterable[int], num_waiting: int, max_queued: int) -> bool:
    """Whether `max_queued` requests or more wait with all of their sequences.

    unfinished_newest_first: the number of unfinished sequences of each open request. num_waiting: how many of all these
    do not run. Requests start in the order in which they came, so the newest wait.
    """
    newest = list(islice(unfinished_newest_first, max_queued))
    return len(newest) == max_queued and sum(newest) <= num_waiting
