"""A usage curve as few points, for display."""

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
