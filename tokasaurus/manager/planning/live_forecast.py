"""The KV forecast for those who watch: a usage curve as few points, and when a waiting sequence will fit.

No decision depends on these."""

# H future steps in which running sequences use blocks, D steps that the sequence takes, M runs of shared blocks

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.kv_simulation import UsageCurve

Int64Array = NDArray[np.int64]


def curve_points(curve: UsageCurve, max_points: int) -> tuple[Int64Array, Int64Array]:
    """(steps, blocks) of points on the curve, in order of the steps, at most `max_points`, which is at least 4.

    The first is at step 0, the last at the step from which on no block is in use. Between two points that the curve has
    at the ends of its spans, it does not fall. If there are too many, time is divided into equal parts, of each of
    which the highest and the lowest point remain.
    """
    ends = np.concatenate((np.zeros(1, np.int64), curve.steps))
    steps = np.unique(np.concatenate((ends, curve.steps + 1)))
    blocks = curve.at(steps)
    if len(steps) <= max_points:
        return steps, blocks
    num_parts = (max_points - 2) // 2
    parts = steps * num_parts // (int(steps[-1]) + 1)
    by_height = np.lexsort((blocks, parts))
    is_first = np.diff(parts[by_height], prepend=-1) != 0
    is_last = np.append(is_first[1:], True)
    kept = np.unique(np.concatenate((by_height[is_first], by_height[is_last], [0, len(steps) - 1])))
    return steps[kept], blocks[kept]


def first_fitting_step(
    used: Int64Array,
    own: Int64Array,
    shared_blocks: Int64Array,
    shared_last_steps: Int64Array,
    num_blocks: int,
    earliest: int = 0,
) -> int | None:
    """The first step t >= `earliest` in which the sequence can be admitted so that at most `num_blocks` are in use at
    every later step; None if it never fits.

    used: [H] blocks in use by the running sequences now and after each step; 0 later. own: [D] blocks of the sequence
    alone, s steps after its admission, never falling; D >= 1, and after D steps it has none. shared_blocks: [M] blocks
    that it shares with running sequences, which count among `used` until shared_last_steps [M], or that are cached
    (-1); after that, they count for it while it runs; shared_last_steps < H.

    In step g, the sequence may be at most so many steps old that its blocks still fit. So each g excludes an interval
    of t, and the result is the first t outside of all of them. Cost: H + D.
    """
    horizon, last_age = len(used), len(own) - 1
    num_steps = horizon + last_age
    begins = np.bincount(np.minimum(shared_last_steps + 1, num_steps), shared_blocks, num_steps + 1)[:num_steps]
    room = num_blocks - begins.cumsum().astype(np.int64)
    room[:horizon] -= used
    max_age = own.searchsorted(room, side="right") - 1  # -1: it may not run at all
    steps = np.flatnonzero(max_age < last_age)
    changes = np.zeros(num_steps + 1, np.int64)
    begin = np.maximum(steps - last_age, 0)
    np.add.at(changes, begin, 1)
    np.add.at(changes, np.maximum(steps - max_age[steps], begin), -1)
    fits = np.flatnonzero(changes[:horizon].cumsum()[earliest:] == 0)
    if len(fits):
        return earliest + int(fits[0])
    fits_alone = int(shared_blocks.sum() + own[-1]) <= num_blocks
    return max(earliest, horizon) if fits_alone else None
