"""Which blocks of the prefix tree several sequences hold, and until when."""

# N sequences, T nodes of the tree's arrays, M nodes that several sequences share

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.kv_simulation import SharedLoads

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """What running sequences share, as `find_shared_blocks` found it."""

    num_shared_blocks: Int64Array
    """[N] per sequence, the blocks from the root on that another sequence holds too."""
    last_steps: Int64Array
    """[T] the largest end step of the sequences that hold the node; -1 for the root and for nodes that none holds."""
    nodes: Int64Array
    """[M] indices of the nodes that at least two sequences hold, without the root; sorted."""
    loads: SharedLoads
    """Of `nodes`, in their order: the blocks of each, in use from now until its last step."""


def deepest_shared_nodes(
    node_of_sequence: NDArray[np.integer], parents: Int32Array, num_sequences: Int32Array
) -> Int32Array:
    """[N] the deepest node on the path of each sequence that another sequence holds too; the root, where none does.

    Arguments as for find_shared_blocks. The climb doubles its stride, so that a deep tree takes few rounds.
    """
    assert num_sequences[0] >= 2, "climbing ends at the root only where that counts as shared"
    toward_shared = np.where(num_sequences < 2, parents, np.arange(len(parents), dtype=parents.dtype))
    deepest: Int32Array = toward_shared[node_of_sequence]
    while num_sequences[deepest].min(initial=2) < 2:
        toward_shared = toward_shared[toward_shared]
        deepest = toward_shared[deepest]
    return deepest


def find_shared_blocks(
    node_of_sequence: NDArray[np.integer],
    end_steps: Int64Array,
    parents: Int32Array,
    end_blocks: Int32Array,
    num_sequences: Int32Array,
) -> SharedBlocks:
    """What N sequences, among them all that hold any node of a prefix tree, share of it.

    node_of_sequence: [N] the deepest node that a sequence holds. end_steps: [N] the last t at which it does, >= 0.
    parents, end_blocks, num_sequences: [T] the tree by node index, 0 being the root and its own parent: blocks from
    the root to the node's end (0 at the root), and sequences that hold it (at the root at least 2; 0 at free indices).

    The climb doubles its stride, so that a deep tree takes few rounds.
    """
    deepest = deepest_shared_nodes(node_of_sequence, parents, num_sequences)
    num_shared_blocks = end_blocks[deepest].astype(np.int64)

    last_steps = np.full(len(parents), -1, np.int64)
    np.maximum.at(last_steps, node_of_sequence, end_steps)
    # Each round hands every node the last steps of what hangs below it at up to twice the depth of the round before.
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
