"""KV simulation: how many KV blocks are in use after every future step, computed only where the usage curve changes.

Time t counts steps sent from now on: t = 0 is now, t = 1 is after the next step. Every start, end and release splits
time into spans in which the same sequences grow. Within a span one formula covers all of them: a sequence with `room`
free tokens in its last block at t = 0 has allocated t // page_size + (t % page_size > room) more blocks at t, so a span
needs only the number of growing sequences, and for each remainder how many of them have less room.

Blocks of the prefix tree that several sequences share are found by `find_shared_blocks` and counted once.
"""

# N sequences, M shared runs of blocks, S spans of time (the last one is endless), U = S - 1 breakpoints, P page size,
# T node indices of a prefix tree

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.status import WindowGroups

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_MAX_SINGLE_LEVELS = 8
"""Levels climbed one by one, before all nodes of the tree are visited."""


@dataclass(frozen=True, slots=True)
class SequenceLoads:
    """Blocks that are each used by one sequence. All arrays are int64 [N].

    At t a sequence uses ceil((num_tokens + clip(t - start_steps, 0, num_steps)) / page_size) blocks, until they are
    freed after the step start_steps + num_steps, or a few steps later (see release_delay). What layers with windows
    keep of a sequence is a load of its own: it uses several blocks for page_size tokens, and grows no more once the
    window is full.
    """

    num_tokens: Int64Array
    """KV tokens in its own blocks now, >= 0, without tokens in blocks that SharedLoads counts."""
    start_steps: Int64Array
    """Steps before the first in which it decodes: 0 if it decodes in the next step."""
    num_steps: Int64Array
    """Decode steps it will take, one token each, >= 0."""
    weights: Int64Array | None = None
    """Blocks for page_size tokens; None: 1 for all."""
    held_steps: Int64Array | None = None
    """Steps after these until the last one, in which it does not grow; None: 0 for all."""


def join_loads(first: SequenceLoads, second: SequenceLoads) -> SequenceLoads:
    """The loads of both."""
    arrays = []
    for name, default in (("num_tokens", 0), ("start_steps", 0), ("num_steps", 0), ("weights", 1), ("held_steps", 0)):
        both = (getattr(loads, name) for loads in (first, second))
        filled = (
            np.full(len(loads.num_tokens), default) if own is None else own
            for loads, own in zip((first, second), both, strict=True)
        )
        arrays.append(np.concatenate(list(filled)))
    return SequenceLoads(*arrays)


def window_loads(
    windows: WindowGroups, page_size: int, num_tokens: Int64Array, start_steps: Int64Array, num_steps: Int64Array
) -> SequenceLoads:
    """What layers with windows keep of sequences, [N] each. num_tokens: those kept now of each, in blocks that are its
    own."""
    most = windows.num_held(page_size) * page_size
    num_kept = np.minimum(num_tokens, most)
    growing = np.minimum(num_steps, most - num_kept)
    weights = np.full(len(num_tokens), windows.num_groups)
    return SequenceLoads(num_kept, start_steps, growing, weights, num_steps - growing)


@dataclass(frozen=True, slots=True)
class SharedLoads:
    """Runs of blocks that several sequences use, counted once. All arrays are int64 [M]."""

    num_blocks: Int64Array
    first_steps: Int64Array
    """The blocks are in use at every t with first_steps <= t <= last_steps; first_steps >= 0."""
    last_steps: Int64Array
    """At least first_steps."""

    def and_blocks(self, num_blocks: int, last_step: int) -> "SharedLoads":
        """These, and blocks in use from now on to the last step."""
        if not num_blocks:
            return self
        added = (num_blocks, 0, max(0, last_step))
        return SharedLoads(
            *(
                np.append(own, one)
                for own, one in zip((self.num_blocks, self.first_steps, self.last_steps), added, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class UsageCurve:
    """Blocks in use at every t >= 0; the result of `simulate_kv`."""

    steps: Int64Array
    """[U] sorted and unique: the last step of every span but the endless one, in which no block is in use."""
    blocks: Int64Array
    """[U] blocks in use at `steps`. Usage never falls within a span, so these include the largest usage."""
    peak: int
    """The largest usage over all t >= 0."""
    page_size: int
    constant_blocks: Int64Array
    """[S] blocks of runs and sequences that do not grow in the span, plus the growing sequences' blocks at t = 0."""
    num_growing: Int64Array
    """[P + 1, S] row r: growing sequences of the span with room for fewer than r tokens at t = 0, by their weights; row
    P: all."""

    def at(self, steps: Int64Array) -> Int64Array:
        """Blocks in use at each t of `steps`; t >= 0, in any order."""
        spans = self.steps.searchsorted(steps)
        return _blocks_in_use(steps, spans, self.page_size, self.constant_blocks, self.num_growing)


def simulate_kv(loads: SequenceLoads, shared: SharedLoads, page_size: int, release_delay: int) -> UsageCurve:
    """Blocks in use at every future step. Cost depends on the number of sequences and breakpoints.

    release_delay: steps from a sequence's last step until its blocks are freed. They are freed when the result of that
    step arrives, and steps are sent ahead of results. `shared` must include this delay in its last_steps.
    """
    starts, weights = loads.start_steps, loads.weights
    after_ends = starts + loads.num_steps + 1
    after_held = after_ends if loads.held_steps is None else after_ends + loads.held_steps
    after_shared = shared.last_steps + 1

    # A growing sequence is treated as if it had grown since t = 0, from fewer tokens (possibly a negative number).
    num_tokens_at_0 = loads.num_tokens - starts
    blocks_at_0 = _num_blocks(num_tokens_at_0, page_size)
    room_at_0 = blocks_at_0 * page_size - num_tokens_at_0
    blocks_before_start = _num_blocks(loads.num_tokens, page_size)
    blocks_at_end = _num_blocks(loads.num_tokens + loads.num_steps, page_size)
    if weights is not None:
        blocks_at_0, blocks_before_start, blocks_at_end = (
            weights * blocks for blocks in (blocks_at_0, blocks_before_start, blocks_at_end)
        )

    # Steps are bounded by the context length, so a table of all steps is far cheaper than sorting.
    horizon = int(max(after_held.max(initial=0) + release_delay, after_shared.max(initial=0)))
    is_span_start = np.zeros(horizon + 1, np.bool_)
    is_span_start[after_ends] = True
    sequence_ends = np.flatnonzero(is_span_start)
    is_span_start[after_held + release_delay] = True
    for steps in (0, sequence_ends + release_delay, starts, shared.first_steps, after_shared):
        is_span_start[steps] = True
    span_starts = np.flatnonzero(is_span_start)
    num_spans = len(span_starts)
    span_from = np.empty(horizon + 1, np.int64)
    span_from[span_starts] = np.arange(num_spans)
    first_spans, end_spans = span_from[starts], span_from[after_ends]

    # bincount adds in float64, which is exact for integers below 2^53.
    blocks_freed = np.bincount(end_spans, blocks_at_end, num_spans)
    changes = np.zeros(num_spans)
    changes += blocks_freed - np.bincount(end_spans, blocks_at_0, num_spans)
    if loads.held_steps is None:
        changes[span_from[sequence_ends + release_delay]] -= blocks_freed[span_from[sequence_ends]]
    else:
        changes -= np.bincount(span_from[after_held + release_delay], blocks_at_end, num_spans)
    changes += np.bincount(span_from[shared.first_steps], shared.num_blocks, num_spans)
    changes -= np.bincount(span_from[after_shared], shared.num_blocks, num_spans)
    changes[0] += blocks_before_start.sum()
    late = np.flatnonzero(starts)  # the others grow from t = 0 on, so both counts are equal
    changes += np.bincount(first_spans[late], (blocks_at_0 - blocks_before_start)[late], num_spans)
    constant_blocks = changes.cumsum().astype(np.int64)

    rows = (room_at_0 + 1) * num_spans
    table_size = (page_size + 1) * num_spans
    joins = np.bincount(rows + first_spans, weights, table_size)
    leaves = np.bincount(rows + end_spans, weights, table_size)
    num_growing = (joins - leaves).astype(np.int64).reshape(page_size + 1, num_spans).cumsum(axis=1).cumsum(axis=0)

    last_steps = span_starts[1:] - 1
    blocks = _blocks_in_use(last_steps, np.arange(num_spans - 1), page_size, constant_blocks, num_growing)
    return UsageCurve(last_steps, blocks, int(blocks.max(initial=0)), page_size, constant_blocks, num_growing)


def fits_together(base: UsageCurve, extra: UsageCurve, num_blocks: int) -> bool:
    """Whether both curves together stay within `num_blocks` at every t >= 0.

    Neither curve falls between breakpoints, so the largest sum is at a breakpoint of one of them.
    """
    if base.peak + extra.peak <= num_blocks:
        return True
    if max(base.peak, extra.peak) > num_blocks:
        return False
    if (extra.blocks + base.at(extra.steps)).max(initial=0) > num_blocks:
        return False
    return bool((base.blocks + extra.at(base.steps)).max(initial=0) <= num_blocks)


class TreeArrays(Protocol):
    """A prefix tree by node index: index 0 is the root, its own parent. All arrays are int32 [T]."""

    parents: Int32Array
    end_blocks: Int32Array
    """Blocks from the root to the node's end; 0 at the root."""
    num_sequences: Int32Array
    """Sequences that use the node: at least 2 at the root, 0 at free indices."""


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks that running sequences share; the result of `find_shared_blocks`."""

    num_shared_blocks: Int64Array
    """[N] leading blocks of each sequence that another sequence uses too."""
    last_steps: Int64Array
    """[T] largest end step of the sequences that use the node; -1 for the root and for unused nodes."""
    nodes: Int64Array
    """[M] indices of the nodes that at least two sequences use, without the root; sorted."""
    loads: SharedLoads
    """The blocks of each of `nodes`, in the same order, in use from now until its last step."""


def deepest_shared_nodes(node_of_sequence: NDArray[np.integer], tree: TreeArrays) -> Int32Array:
    """[N] deepest node on the path of each sequence that another sequence uses too; the root if there is none.

    node_of_sequence: as for find_shared_blocks. The first rounds climb one level each and take O(N), however large the
    tree. After them, each round doubles the number of levels climbed, so a deep tree takes few rounds.
    """
    parents, num_sequences = tree.parents, tree.num_sequences
    assert num_sequences[0] >= 2, "the root must count as shared, or the climb does not end"
    deepest: Int32Array = node_of_sequence.astype(parents.dtype)
    for _ in range(_MAX_SINGLE_LEVELS):
        is_private = num_sequences[deepest] < 2
        if not is_private.any():
            return deepest
        deepest = np.where(is_private, parents[deepest], deepest)
    toward_shared = np.where(num_sequences < 2, parents, np.arange(len(parents), dtype=parents.dtype))
    while num_sequences[deepest].min(initial=2) < 2:
        deepest = toward_shared[deepest]
        toward_shared = toward_shared[toward_shared]
    return deepest


def find_shared_blocks(node_of_sequence: NDArray[np.integer], end_steps: Int64Array, tree: TreeArrays) -> SharedBlocks:
    """Find the blocks that N sequences share in a prefix tree. They must include all sequences that use any node.

    node_of_sequence: [N] deepest node that each sequence uses. end_steps: [N] last t at which it does, >= 0.

    Each round doubles the number of levels climbed, so a deep tree takes few rounds.
    """
    parents, end_blocks, num_sequences = tree.parents, tree.end_blocks, tree.num_sequences
    deepest = deepest_shared_nodes(node_of_sequence, tree)
    num_shared_blocks = end_blocks[deepest].astype(np.int64)

    last_steps = np.full(len(parents), -1, np.int64)
    np.maximum.at(last_steps, node_of_sequence, end_steps)
    # After each round a node has the last steps of descendants twice as many levels below as after the round before.
    climbing = np.flatnonzero(num_sequences > 0)
    ancestors = parents
    while True:
        climbing = climbing[ancestors[climbing] > 0]
        if not climbing.size:
            break
        np.maximum.at(last_steps, ancestors[climbing], last_steps[climbing])
        ancestors = ancestors[ancestors]
    last_steps[0] = -1

    nodes = np.flatnonzero((num_sequences > 1) & (last_steps >= 0))
    loads = SharedLoads(
        (end_blocks[nodes] - end_blocks[parents[nodes]]).astype(np.int64),
        np.zeros(len(nodes), np.int64),
        last_steps[nodes],
    )
    return SharedBlocks(num_shared_blocks, last_steps, nodes, loads)


def _num_blocks(num_tokens: Int64Array, page_size: int) -> Int64Array:
    """Blocks for `num_tokens` tokens, rounded up; negative for a negative number of tokens."""
    num_blocks: Int64Array = -(-num_tokens // page_size)
    return num_blocks


def _blocks_in_use(
    steps: Int64Array, spans: Int64Array, page_size: int, constant_blocks: Int64Array, num_growing: Int64Array
) -> Int64Array:
    """Blocks in use at `steps`; steps[i] lies in span spans[i]."""
    num_pages = steps // page_size
    remainders = steps - num_pages * page_size
    blocks_taken: Int64Array = num_pages * num_growing[page_size, spans] + num_growing[remainders, spans]
    return constant_blocks[spans] + blocks_taken
