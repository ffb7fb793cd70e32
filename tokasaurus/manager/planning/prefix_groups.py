"""Prefix groups: decoding sequences that attend to a shared prefix together. Source: Hydragen, arXiv 2402.05099."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.shared_blocks import deepest_shared_nodes

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """G disjoint prefix groups of N sequences."""

    group_of_sequence: Int64Array
    """[N], 1 to G; 0 for a sequence in no group."""
    num_blocks: Int64Array
    """[G + 1], blocks in each group's shared prefix; entry 0 is 0."""


def group_by_prefix(
    node_of_sequence: Int64Array,
    parents: Int32Array,
    end_blocks: Int32Array,
    num_sequences: Int32Array,
    min_group_size: int,
    min_blocks: int,
) -> Grouping:
    """Group sequences that share a prefix of whole blocks, longest prefixes first.

    node_of_sequence: [N] deepest prefix tree node that each decoding sequence uses. parents, end_blocks, num_sequences:
    the tree by node index, as for find_shared_blocks.
    min_group_size: fewest sequences that repay the second pass over their queries. min_blocks: shortest prefix in
    blocks, at least 1.

    Nodes are visited deepest first. A node with enough sequences becomes a group; otherwise its sequences join those of
    its parent. So samples of one question share the whole question in a group, not just the beginning common to all
    questions.
    """
    deepest = deepest_shared_nodes(node_of_sequence, parents, num_sequences)
    is_long = end_blocks[deepest] >= min_blocks
    nodes, node_indices, counts = np.unique(deepest[is_long], return_inverse=True, return_counts=True)
    num_ungrouped = dict(zip(nodes.tolist(), counts.tolist(), strict=True))
    group_of_node: dict[int, int] = {}
    joined: dict[int, int] = {}
    num_blocks = [0]
    deepest_first = [(-int(end_blocks[node]), node) for node in num_ungrouped]
    heapify(deepest_first)
    while deepest_first:
        _, node = heappop(deepest_first)
        if num_ungrouped[node] >= min_group_size:
            group_of_node[node] = len(num_blocks)
            num_blocks.append(int(end_blocks[node]))
            continue
        parent = int(parents[node])
        if end_blocks[parent] >= min_blocks:
            if parent not in num_ungrouped:
                num_ungrouped[parent] = 0
                heappush(deepest_first, (-int(end_blocks[parent]), parent))
            num_ungrouped[parent] += num_ungrouped[node]
            joined[node] = parent

    # Parents are visited after their children; in reverse order, a parent's group is known before its children need it.
    for node, parent in reversed(joined.items()):
        group_of_node[node] = group_of_node.get(parent, 0)
    group_of_sequence = np.zeros(len(node_of_sequence), np.int64)
    groups = np.array([group_of_node.get(node, 0) for node in nodes.tolist()], np.int64)
    group_of_sequence[is_long] = groups[node_indices]
    return Grouping(group_of_sequence, np.array(num_blocks))
