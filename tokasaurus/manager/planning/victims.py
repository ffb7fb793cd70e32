"""Whom to preempt when blocks run out."""

import numpy as np
from numpy.typing import NDArray


def choose_victims(
    num_lost: NDArray[np.int64], num_freed: NDArray[np.int64], admitted_at: NDArray[np.int64], num_short: int
) -> NDArray[np.int64]:
    """Which of N sequences to preempt so that `num_short` blocks come free: places in the arrays, the newest first.

    num_lost: [N], tokens that each would have to compute again. num_freed: [N], blocks that it alone holds, and the one
    that it would take in the next step. admitted_at: [N], order of admission.

    Those that lose least go first, of equal ones the newest. So the one that is furthest goes last: it will end,
    however short of blocks the others are. All of them, where all do not suffice.
    """
    order = np.lexsort((-admitted_at, num_lost))
    order = order[num_freed[order] > 0]
    num_needed = int(np.searchsorted(np.cumsum(num_freed[order]), num_short)) + 1
    victims = order[:num_needed]
    return victims[np.argsort(-admitted_at[victims])]
