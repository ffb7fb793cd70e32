"""Which blocks of the prefix tree several sequences use, and until when."""

# N sequences, T node indices, M nodes that several sequences use

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.kv_simulation import SharedLoads

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_MOST_SINGLE_LEVELS = 8
"""Levels climbed one by one, before all nodes of the tree are visited."""


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


def deepest_shared_nodes(
    node_of_sequence: NDArray[np.integer], parents: Int32Array, num_sequences: Int32Array
) -> Int32Array:
    """[N] deepest node on the path of each sequence that another sequence uses too; the root if there is none.

    Arguments as for find_shared_blocks. The first rounds climb one level each and take O(N), however large the tree.
    After them, each round doubles the number of levels climbed, so a deep tree takes few rounds.
    """
    assert num_sequences[0] >= 2, "the root must count as shared, or the climb does not end"
    deepest: Int32Array = node_of_sequence.astype(parents.dtype)
    for _ in range(_MOST_SINGLE_LEVELS):
        is_private = num_sequences[deepest] < 2
        if not is_private.any():
            return deepest
        deepest = np.where(is_private, parents[deepest], deepest)
    toward_shared = np.where(num_sequences < 2, parents, np.arange(len(parents), dtype=parents.dtype))
    while num_sequences[deepest].min(initial=2) < 2:
        deepest = toward_shared[deepest]
        toward_shared = toward_shared[toward_shared]
    return deepest


def find_shared_blocks(
    node_of_sequence: NDArray[np.integer],
    end_steps: Int64Array,
    parents: Int32Array,
    end_blocks: Int32Array,
    num_sequences: Int32Array,
) -> SharedBlocks:
    """Find the blocks that N sequences share in a prefix tree. They must include all sequences that use any node.

    node_of_sequence: [N] deepest node that each sequence uses. end_steps: [N] last t at which it does, >= 0.
    The tree is given by node index; index 0 is the root, its own parent. parents: [T]. end_blocks: [T] blocks from the
    root to the node's end, 0 at the root. num_sequences: [T] sequences that use the node, at least 2 at the root, 0 at
    free indices.

    Each round doubles the number of levels climbed, so a deep tree takes few rounds.
    """
    deepest = deepest_shared_nodes(node_of_sequence, parents, num_sequences)
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
