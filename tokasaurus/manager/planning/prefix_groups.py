"""Prefix groups: decoding sequences that attend to a shared prefix together. Source: Hydragen, arXiv 2402.05099.

`group_by_prefix` finds them by the costs that the worker measured: once, for a few shapes, on a machine that may have
been busy. `GroupTrials` corrects these costs by the steps in service. A trial is a decode step with groups where its
neighbours have none, or the other way round. The costs are scaled so that the choice which they make would have lost
least time in the latest trials, once these differ from what was measured by more than their noise.
"""

# N sequences, K candidate nodes

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.kv_simulation import TreeArrays, deepest_shared_nodes
from tokasaurus.messages.status import HydragenCosts

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

MAX_ANCESTORS = 32
"""Most nodes above a sequence's deepest shared node that are considered for its group. It bounds the work of grouping;
nodes at which no other sequence joins are skipped and do not count."""

_MAX_SKIPPED = 32
"""Most nodes in a row that are skipped; the next one is considered although no sequence joins there."""

FIRST_INTERVAL = 128
MAX_INTERVAL = 4096
"""Decode steps before the first trial, and between trials at most. Each trial after which the choice is clearly right
multiplies the interval by 4, so that trials cost far less than 1 % of the time."""

OPTIMISM = 4.0
"""Where no group is formed, a trial forms the groups that would save time at 1 / OPTIMISM of the costs."""

NUM_KEPT = 32
"""Newest trials that count."""

MAX_GAIN = 0.25
"""A trial that shows more than this share of a step's time counts as if it showed this: another process may have
delayed one step."""

MIN_REGRET = 0.02
"""Another scale is used if it would have saved at least this share of a step's time in the mean of the trials."""

DOUBT = 1.5
"""The sum of the trials' gains counts if it exceeds this many standard deviations of noise: three equal trials do."""

SIMILAR = 0.05
"""Largest relative difference between the numbers of rows of two steps that are compared."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """G disjoint prefix groups of N sequences."""

    group_of_sequence: Int64Array
    """[N], 1 to G; 0 for a sequence in no group."""
    num_blocks: Int64Array
    """[G + 1], blocks in each group's shared prefix; entry 0 is 0."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Nodes whose prefix may become a group's, longest prefixes first: every node comes before its ancestors."""

    parents: Int64Array
    """[K] position of the next candidate above the node; K if there is none."""
    num_rows: Int64Array
    """[K] sequences whose deepest candidate is the node."""
    num_blocks: Int64Array
    """[K] blocks from the root to the node's end."""
    of_sequence: Int64Array
    """[N] position of the deepest candidate of each sequence; K if it has none."""


def group_by_prefix(
    node_of_sequence: Int64Array,
    tree: TreeArrays,
    min_group_size: int,
    min_blocks: int,
    costs: HydragenCosts,
    page_size: int,
) -> Grouping:
    """Choose the disjoint groups of sequences sharing a prefix of whole blocks that save most time of attention.

    node_of_sequence: [N] deepest node of `tree` that each decoding sequence uses. min_group_size, min_blocks: smallest
    group (at least 2) and shortest prefix (at least 1 block) allowed. page_size: tokens per block.

    A group of m sequences whose prefix has L tokens saves, in tokens of KV that a sequence need not read,

        m * L - (costs.per_group + costs.per_group_token * L + m * (costs.per_row + costs.per_row_token * L)).

    costs.step_price does not influence which groups are best; saved_by_step tells for each step whether it is repaid.

    The groups' total is the largest possible one, if no more than MAX_ANCESTORS candidates lie above any node and
    every group of that optimum has min_group_size sequences. A group that would get fewer is not formed, and its
    sequences may join a group above; the total may then be smaller than the best with that limit.

    Work: at most MAX_ANCESTORS * _MAX_SKIPPED array operations over the sequences, and a few Python steps for each
    candidate: the deepest shared nodes and the nodes where their paths meet, fewer than 2 * N if all sequences decode.
    The size of the tree matters only where more than a few nodes lie between a sequence's end and its shared part.
    """
    found = _find_candidates(node_of_sequence, tree, min_blocks)
    num_tokens = (found.num_blocks * page_size).astype(np.float64)
    saved_by_row = num_tokens * (1 - costs.per_row_token) - costs.per_row
    cost = num_tokens * costs.per_group_token + costs.per_group
    is_leaf = np.ones(len(num_tokens) + 1, np.bool_)
    is_leaf[found.parents] = False
    leaves, inner = np.flatnonzero(is_leaf[:-1]), np.flatnonzero(~is_leaf[:-1])
    thresholds = _thresholds(found, leaves, inner, saved_by_row, cost, min_group_size)
    node_of_group, group_of = _form_groups(found, leaves, inner, saved_by_row, thresholds)
    num_blocks = np.append(0, found.num_blocks[node_of_group])
    return Grouping(group_of[found.of_sequence], num_blocks)


def saved_by_step(sizes: Int32Array, num_blocks: Int32Array, costs: HydragenCosts, page_size: int) -> float:
    """What a decode step with these groups saves, in tokens; negative if it is faster without any.

    sizes, num_blocks: [G], of each group.
    """
    num_rows, num_tokens = sizes.astype(np.float64), num_blocks * float(page_size)
    by_row = num_tokens * (1.0 - costs.per_row_token) - costs.per_row
    by_group = num_rows * by_row - costs.per_group - num_tokens * costs.per_group_token
    return float(by_group.sum()) - costs.step_price(len(sizes))


def _form_groups(
    found: _Candidates, leaves: Int64Array, inner: Int64Array, saved_by_row: Float64Array, thresholds: Float64Array
) -> tuple[Int64Array, Int64Array]:
    """Arguments and thresholds as in _thresholds -> the node of each group, and [K + 1] the group of each node's own
    rows, 0 for none."""
    node_of_group: list[int] = []
    group_of, saved_above = [0] * (len(thresholds) + 1), [0.0] * (len(thresholds) + 1)
    # In reverse order, parents come first: the group that a node's rows could join is known before the node's turn.
    rows = zip(
        inner.tolist(), *(array[inner].tolist() for array in (found.parents, saved_by_row, thresholds)), strict=True
    )
    for node, parent, saved, threshold in reversed(list(rows)):
        group_of[node], saved_above[node] = group_of[parent], saved_above[parent]
        if saved_above[parent] < threshold:
            node_of_group.append(node)
            group_of[node], saved_above[node] = len(node_of_group), saved
    groups, parents = np.array(group_of, np.int64), found.parents[leaves]
    forms_group = np.array(saved_above)[parents] < thresholds[leaves]
    own_groups = len(node_of_group) + np.cumsum(forms_group)
    groups[leaves] = np.where(forms_group, own_groups, groups[parents])
    return np.append(np.array(node_of_group, np.int64), leaves[forms_group]), groups


def _thresholds(
    found: _Candidates,
    leaves: Int64Array,
    inner: Int64Array,
    saved_by_row: Float64Array,
    cost: Float64Array,
    min_group_size: int,
) -> Float64Array:
    """[K] The node's group is formed exactly if a row that joins the next group above saves less than this.

    leaves: nodes below which there is no other; inner: all others, both in order. saved_by_row, cost: [K]; a group of m
    rows at the node saves m * saved_by_row - cost. 0: never formed.

    Let best(x) be the most that the rows below a node can save if each may also save x in a group above; it grows with
    x. At x = 0 rows join no group. If no group is formed at the node, best is the sum over its children and its own
    rows; it is convex, with a slope of as many rows as join the group above. That number grows where x passes the
    threshold of a group below, whose rows are then better off above. If a group is formed at the node, the rows below
    save as much as with x = saved_by_row, less the node's cost, whatever the group above saves. So best is the larger
    of the two, and the threshold is where they are equal.
    """
    size = len(found.parents) + 1
    thresholds = np.zeros(size - 1)
    own_rows = found.num_rows[leaves]
    own_thresholds = saved_by_row[leaves] - cost[leaves] / own_rows
    is_formed = (own_thresholds > 0) & (own_rows >= min_group_size)
    thresholds[leaves] = np.where(is_formed, own_thresholds, 0.0)
    formed = leaves[is_formed]
    parents, rows, limits = found.parents[formed], found.num_rows[formed], thresholds[formed]

    alone = np.append(found.num_rows, 0)
    np.add.at(alone, found.parents[leaves[~is_formed]], own_rows[~is_formed])
    num_alone: list[int] = alone.tolist()  # rows below the node that are in no group if x = 0
    # Of the groups below: (threshold, rows that join the group above where x passes it); the sum of these rows; and the
    # sum of thresholds times rows. If x passes all, best grows by (num_alone + num_joining) * x - offset.
    joins_of: list[list[tuple[float, int]]] = [[] for _ in range(size)]
    for parent, join in zip(parents.tolist(), zip(limits.tolist(), rows.tolist(), strict=True), strict=True):
        joins_of[parent].append(join)
    num_joining = np.bincount(parents, rows, size).tolist()
    offset = np.bincount(parents, rows * limits, size).tolist()

    of_inner = zip(
        inner.tolist(), *(array[inner].tolist() for array in (found.parents, saved_by_row, cost)), strict=True
    )
    for node, parent, saved, own_cost in of_inner:
        joins = sorted(joins_of[node])
        while joins and joins[-1][0] > saved:  # saves more than here and further up: stays a group
            threshold, count = joins.pop()
            num_joining[node] -= count
            offset[node] -= threshold * count
        num_rows = num_alone[node] + num_joining[node]
        gain = num_rows * saved - offset[node] - own_cost
        if gain > 0 and num_rows >= min_group_size:
            num_passed, count, passed_offset = _passed(joins, num_alone[node], gain)
            thresholds[node] = threshold = (gain + passed_offset) / count
            joins[:num_passed] = [(threshold, count)]
            num_joining[node] = num_rows
            offset[node] += threshold * count - passed_offset
        else:
            num_alone[parent] += num_alone[node]
        joins_of[parent] += joins
        num_joining[parent] += num_joining[node]
        offset[parent] += offset[node]
    return thresholds


def _passed(joins: list[tuple[float, int]], num_alone: int, gain: float) -> tuple[int, int, float]:
    """How many of the sorted `joins` the smallest x passes at which best without a group here has grown by `gain`; the
    rows that then join the group above; and the offset: x is (gain + offset) / rows."""
    num_rows, offset = num_alone, 0.0
    for index, (threshold, count) in enumerate(joins):
        if num_rows * threshold - offset >= gain:
            return index, num_rows, offset
        num_rows += count
        offset += threshold * count
    return len(joins), num_rows, offset


def _find_candidates(node_of_sequence: Int64Array, tree: TreeArrays, min_blocks: int) -> _Candidates:
    """Arguments as for group_by_prefix. Candidates are the deepest shared nodes, and the nodes above them where other
    sequences join: between two of these, the same sequences share less."""
    end_blocks = tree.end_blocks
    deepest = deepest_shared_nodes(node_of_sequence, tree)
    own, index_in_own, counts = np.unique(deepest, return_inverse=True, return_counts=True)
    is_long = end_blocks[own] >= min_blocks
    level = own[is_long]
    nodes, ups = level, np.zeros(0, np.int32)
    for _ in range(MAX_ANCESTORS):
        up = _next_joined(level, tree)
        up[end_blocks[up] < min_blocks] = 0
        ups = np.concatenate((ups, up))
        level = np.setdiff1d(up[up > 0], nodes)
        if not level.size:
            break
        nodes = np.concatenate((nodes, level))
    ups = np.concatenate((ups, np.zeros(len(nodes) - len(ups), np.int32)))

    order = np.argsort(-end_blocks[nodes], kind="stable")
    nodes, ups = nodes[order], ups[order]
    by_index = np.argsort(nodes)

    def positions(wanted: Int32Array) -> Int64Array:
        """[len(wanted)] positions of candidates, which `wanted` must be."""
        return by_index[np.searchsorted(nodes, wanted, sorter=by_index)]

    own_positions = np.full(len(own), len(nodes), np.int64)
    own_positions[is_long] = positions(own[is_long])
    num_rows = np.zeros(len(nodes) + 1, np.int64)
    num_rows[own_positions] = counts  # the last entry is not used
    parent_positions = np.full(len(nodes), len(nodes), np.int64)
    parent_positions[ups > 0] = positions(ups[ups > 0])
    return _Candidates(
        parent_positions,
        num_rows[:-1],
        end_blocks[nodes].astype(np.int64),
        own_positions[index_in_own],
    )


def _next_joined(nodes: Int32Array, tree: TreeArrays) -> Int32Array:
    """The first node above each of `nodes` that more sequences use; a node before it if that is far away."""
    parents, num_sequences = tree.parents, tree.num_sequences
    up = parents[nodes]
    for _ in range(_MAX_SKIPPED):
        is_same = num_sequences[up] == num_sequences[nodes]
        if not is_same.any():
            break
        up = np.where(is_same, parents[up], up)
    return up


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A decode step that has groups while its neighbours have none, or none while they have some."""

    has_groups: bool
    alone: float
    """Tokens of shared prefixes that the grouped rows read if they attend alone."""
    together: float
    """What attention to them takes in groups, in the same unit, by the costs that were measured."""


class GroupTrials:
    """Decides when to make a trial, and keeps what trials have shown."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Factor for the costs that were measured."""
        self._observed: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        self._interval = FIRST_INTERVAL
        self._num_steps = 0  # decode steps since the last trial
        self._before: tuple[int, float] | None = None  # rows and seconds of the last step, if it only decoded
        # a trial's step, until the one after it: with its rows, its seconds, and those of the step before
        self._open: tuple[GroupTrial, int, float, float] | None = None

    def is_due(self) -> bool:
        """Called for each step that only decodes: whether it should be a trial."""
        self._num_steps += 1
        return self._num_steps > self._interval

    def begin(self) -> None:
        """A trial is made now, or there is nothing to try."""
        self._num_steps = 0

    def note(self, num_rows: int, has_prefill: bool, trial: GroupTrial | None, seconds: float) -> bool:
        """The result of a step, in the order of the steps. Returns whether the scale has changed."""
        before, self._before = self._before, None
        begun, self._open = self._open, None
        if has_prefill:
            return False
        if trial is not None:
            if before is not None and _are_similar(before[0], num_rows):
                self._open = trial, num_rows, seconds, before[1]
            return False
        self._before = num_rows, seconds
        if begun is None or not _are_similar(begun[1], num_rows):
            return False
        return self._observe(begun[0], begun[2], (begun[3] + seconds) / 2)

    def _observe(self, trial: GroupTrial, trial_seconds: float, usual_seconds: float) -> bool:
        alone_s, together_s = (usual_seconds, trial_seconds) if trial.has_groups else (trial_seconds, usual_seconds)
        gain = (alone_s - together_s) / max(alone_s, together_s)
        self._observed.append((trial.alone / trial.together, min(max(gain, -MAX_GAIN), MAX_GAIN)))
        before, self.scale = self.scale, self._best_scale()
        gains = [gain if ratio > self.scale else -gain for ratio, gain in self._observed]
        is_confirmed = gains[-1] > 0 and _is_clear(gains)
        self._interval = min(4 * self._interval, MAX_INTERVAL) if is_confirmed else FIRST_INTERVAL
        return before != self.scale

    def _best_scale(self) -> float:
        """1, unless another scale would clearly have lost less time: then the best one, of equals the nearest to 1."""
        losses = list(self._losses(1.0))
        best = sum(losses), 1.0, 1.0
        # The choice changes where the scale passes a trial's ratio.
        for scale in (factor * ratio for ratio, _ in self._observed for factor in (0.99, 1.01)):
            others = list(self._losses(scale))
            if _is_clear([loss - other - MIN_REGRET for loss, other in zip(losses, others, strict=True)]):
                best = min(best, (sum(others), max(scale, 1 / scale), scale))
        return best[2]

    def _losses(self, scale: float) -> Iterator[float]:
        """Time lost in each trial if groups are formed where they save by the scaled costs, in steps."""
        return (max(0.0, -gain if ratio > scale else gain) for ratio, gain in self._observed)


def _is_clear(gains: Sequence[float]) -> bool:
    """Whether the sum of the gains is greater than noise makes it, if the gains are noise around 0."""
    return sum(gains) > DOUBT * math.sqrt(sum(gain * gain for gain in gains))


def _are_similar(num_rows: int, other: int) -> bool:
    return abs(num_rows - other) <= SIMILAR * max(num_rows, other)
