"""Which sequences to preempt when blocks run out."""

import numpy as np
from numpy.typing import NDArray


def choose_victims(
    num_lost: NDArray[np.int64], num_freed: NDArray[np.int64], admitted_at: NDArray[np.int64], num_short: int
) -> NDArray[np.int64]:
    """Which of N sequences to preempt to free `num_short` blocks: indices into the arrays, newest sequence first.

    num_lost: [N] tokens that each would have to recompute. num_freed: [N] blocks that it alone uses, plus the block
    that it would allocate in the next step. admitted_at: [N] order of admission.

    Sequences that lose the fewest tokens are preempted first, the newest first among equals. So the most advanced
    sequence is preempted last, and will finish however short of blocks the others are. If all sequences do not free
    enough, all that free any are preempted.
    """
    order = np.lexsort((-admitted_at, num_lost))
    order = order[num_freed[order] > 0]
    num_needed = int(np.searchsorted(np.cumsum(num_freed[order]), num_short)) + 1
    victims = order[:num_needed]
    return victims[np.argsort(-admitted_at[victims])]
