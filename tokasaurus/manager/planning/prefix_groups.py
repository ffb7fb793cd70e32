"""Which decoding sequences attend to a shared prefix together. Source: Hydragen, arXiv 2402.05099."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.shared_blocks import deepest_shared_nodes

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Disjoint groups of N sequences; G groups.

    group_of_sequence: int64 [N], 1 to G, or 0 for those in none.
    num_blocks: int64 [G + 1], blocks of the prefix that a group shares; 0 at place 0.
    """

    group_of_sequence: Int64Array
    num_blocks: Int64Array


def group_by_prefix(
    node_of_sequence: Int64Array,
    parents: Int32Array,
    end_blocks: Int32Array,
    num_sequences: Int32Array,
    min_group_size: int,
    min_blocks: int,
) -> Grouping:
    """Groups of sequences that share a prefix of whole blocks, the longest prefixes first.

    node_of_sequence: [N] the deepest node of the prefix tree that a decoding sequence holds. parents, end_blocks,
    num_sequences: the tree by node index, as find_shared_blocks takes them.
    min_group_size: fewest sequences that repay the second pass over their queries. min_blocks: the shortest prefix,
    at least 1.

    The walk is depth first: a node whose sequences are enough is a group; where they are not, they join those of its
    parent. So samples of one question form a group up to the end of the question, not of what all questions begin with.
    """
    deepest = deepest_shared_nodes(node_of_sequence, parents, num_sequences)
    is_long = end_blocks[deepest] >= min_blocks
    nodes, places, counts = np.unique(deepest[is_long], return_inverse=True, return_counts=True)
    waiting = dict(zip(nodes.tolist(), counts.tolist(), strict=True))
    group_of_node: dict[int, int] = {}
    joined: dict[int, int] = {}
    num_blocks = [0]
    deepest_first = [(-int(end_blocks[node]), node) for node in waiting]
    heapify(deepest_first)
    while deepest_first:
        _, node = heappop(deepest_first)
        if waiting[node] >= min_group_size:
            group_of_node[node] = len(num_blocks)
            num_blocks.append(int(end_blocks[node]))
            continue
        parent = int(parents[node])
        if end_blocks[parent] >= min_blocks:
            if parent not in waiting:
                waiting[parent] = 0
                heappush(deepest_first, (-int(end_blocks[parent]), parent))
            waiting[parent] += waiting[node]
            joined[node] = parent

    # A parent is met after its children, so following `joined` from the last joined on finds each end in one look-up.
    for node, parent in reversed(joined.items()):
        group_of_node[node] = group_of_node.get(parent, 0)
    group_of_sequence = np.zeros(len(node_of_sequence), np.int64)
    groups = np.array([group_of_node.get(node, 0) for node in nodes.tolist()], np.int64)
    group_of_sequence[is_long] = groups[places]
    return Grouping(group_of_sequence, np.array(num_blocks))
