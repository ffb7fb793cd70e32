"""How many KV blocks are in use after every future step, computed where something changes and nowhere else.

Time is counted in steps sent from now on: t = 0 is now, t = 1 after the next step. Every start, end and release cuts
time into spans in which the same sequences grow. Within a span all of them together are one formula: a sequence with
`room` free tokens in its last block at t = 0 has taken t // page_size + (t % page_size > room) more blocks at t, so a
span needs only how many sequences grow, and how many of them have less room than each remainder.
"""

# N sequences, M shared runs of blocks, S spans of time (the last one without end), U = S - 1 breakpoints, P page size

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceLoads:
    """Blocks that belong to one sequence each; int64 [N] all three.

    At t a sequence holds ceil((num_tokens + clip(t - start_steps, 0, num_steps)) / page_size) blocks, until its blocks
    come back after the step start_steps + num_steps, or a few steps later.
    """

    num_tokens: Int64Array
    """KV tokens in its own blocks now, >= 0; those in blocks counted in SharedLoads are left out."""
    start_steps: Int64Array
    """Steps before the first one in which it decodes: 0 where it decodes in the next step."""
    num_steps: Int64Array
    """Decode steps it will take, one token each, >= 0."""


@dataclass(frozen=True, slots=True)
class SharedLoads:
    """Runs of blocks that several sequences use, counted once; int64 [M] all three."""

    num_blocks: Int64Array
    first_steps: Int64Array
    """In use at every t with first_steps <= t <= last_steps; first_steps >= 0."""
    last_steps: Int64Array
    """At least first_steps."""


@dataclass(frozen=True, slots=True)
class UsageCurve:
    """Blocks in use at every t >= 0, as `simulate_kv` found them."""

    steps: Int64Array
    """[U] sorted and unique: the last step of every span but the endless one, in which nothing is in use any more."""
    blocks: Int64Array
    """[U] blocks in use at `steps`. Within a span usage never falls, so the largest usage of all is among them."""
    peak: int
    """The largest usage over all t >= 0."""
    page_size: int
    constant_blocks: Int64Array
    """[S] blocks that do not grow in the span, and what the growing sequences of the span hold at t = 0."""
    num_growing: Int64Array
    """[P + 1, S] at row r, growing sequences of the span with fewer than r tokens of room at t = 0; at row P, all."""

    def at(self, steps: Int64Array) -> Int64Array:
        """Blocks in use at each t of `steps`, any numbers >= 0 in any order."""
        spans = self.steps.searchsorted(steps)
        return _blocks_in_use(steps, spans, self.page_size, self.constant_blocks, self.num_growing)


def simulate_kv(loads: SequenceLoads, shared: SharedLoads, page_size: int, release_delay: int) -> UsageCurve:
    """Blocks in use at every future step, in time that grows with the sequences and breakpoints, not with the steps.

    release_delay: a sequence's blocks come back only when the result of its last step does, so many steps later, for
    steps are sent ahead of results. `shared` is taken as it is: release_delay are in its last_steps already.
    """
    starts = loads.start_steps
    after_ends = starts + loads.num_steps + 1
    after_shared = shared.last_steps + 1

    # A growing sequence is seen as if it had grown since t = 0, from fewer tokens (even from less than none).
    num_tokens_at_0 = loads.num_tokens - starts
    blocks_at_0 = _num_blocks(num_tokens_at_0, page_size)
    room_at_0 = blocks_at_0 * page_size - num_tokens_at_0
    blocks_before_start = _num_blocks(loads.num_tokens, page_size)
    blocks_at_end = _num_blocks(loads.num_tokens + loads.num_steps, page_size)

    # Steps are bounded by the context length, so that a table of all of them is far cheaper than sorting.
    horizon = int(max(after_ends.max(initial=0) + release_delay, after_shared.max(initial=0)))
    is_span_start = np.zeros(horizon + 1, np.bool_)
    is_span_start[after_ends] = True
    hold_starts = np.flatnonzero(is_span_start)
    for steps in (0, hold_starts + release_delay, starts, shared.first_steps, after_shared):
        is_span_start[steps] = True
    span_starts = np.flatnonzero(is_span_start)
    num_spans = len(span_starts)
    span_from = np.empty(horizon + 1, np.int64)
    span_from[span_starts] = np.arange(num_spans)
    first_spans, end_spans = span_from[starts], span_from[after_ends]

    # bincount adds in float64, which is exact for integers below 2^53.
    held = np.bincount(end_spans, blocks_at_end, num_spans)
    changes = np.zeros(num_spans)
    changes += held - np.bincount(end_spans, blocks_at_0, num_spans)
    changes[span_from[hold_starts + release_delay]] -= held[span_from[hold_starts]]
    changes += np.bincount(span_from[shared.first_steps], shared.num_blocks, num_spans)
    changes -= np.bincount(span_from[after_shared], shared.num_blocks, num_spans)
    changes[0] += blocks_before_start.sum()
    late = np.flatnonzero(starts)  # the others grow from t = 0 on, so that both counts are equal
    changes += np.bincount(first_spans[late], (blocks_at_0 - blocks_before_start)[late], num_spans)
    constant_blocks = changes.cumsum().astype(np.int64)

    rows = (room_at_0 + 1) * num_spans
    table_size = (page_size + 1) * num_spans
    joins = np.bincount(rows + first_spans, minlength=table_size)
    leaves = np.bincount(rows + end_spans, minlength=table_size)
    num_growing = (joins - leaves).reshape(page_size + 1, num_spans).cumsum(axis=1).cumsum(axis=0)

    last_steps = span_starts[1:] - 1
    blocks = _blocks_in_use(last_steps, np.arange(num_spans - 1), page_size, constant_blocks, num_growing)
    return UsageCurve(last_steps, blocks, int(blocks.max(initial=0)), page_size, constant_blocks, num_growing)


def fits_together(base: UsageCurve, extra: UsageCurve, num_blocks: int) -> bool:
    """Whether both together never use more than `num_blocks`, at any t >= 0.

    Between breakpoints of either neither falls, so the largest sum is at a breakpoint of one of them.
    """
    if base.peak + extra.peak <= num_blocks:
        return True
    if max(base.peak, extra.peak) > num_blocks:
        return False
    if (extra.blocks + base.at(extra.steps)).max(initial=0) > num_blocks:
        return False
    return bool((base.blocks + extra.at(base.steps)).max(initial=0) <= num_blocks)


def _num_blocks(num_tokens: Int64Array, page_size: int) -> Int64Array:
    """Blocks that so many tokens take, rounded up; fewer than none for fewer than none."""
    num_blocks: Int64Array = -(-num_tokens // page_size)
    return num_blocks


def _blocks_in_use(
    steps: Int64Array, spans: Int64Array, page_size: int, constant_blocks: Int64Array, num_growing: Int64Array
) -> Int64Array:
    """Blocks at `steps`, each of which lies in the span beside it."""
    num_pages = steps // page_size
    remainders = steps - num_pages * page_size
    blocks_taken: Int64Array = num_pages * num_growing[page_size, spans] + num_growing[remainders, spans]
    return constant_blocks[spans] + blocks_taken
