"""Tests shared blocks against plain sets of blocks."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.planning.kv_simulation import SequenceLoads, SharedBlocks, find_shared_blocks, simulate_kv

Block = tuple[int, int]
"""A block of the tree: its node, and its index within the node."""


@dataclass(frozen=True)
class Tree:
    """A prefix tree, node 0 its root, and the running sequences."""

    parents: list[int]
    lengths: list[int]
    """Blocks of each node."""
    node_of_sequence: list[int]
    """Deepest node of each sequence."""
    end_steps: list[int]
    """Step in which each sequence ends."""

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, without the root."""
        nodes = []
        while node != 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def blocks_of(self, sequence: int) -> list[Block]:
        nodes = self.path(self.node_of_sequence[sequence])
        return [(node, index) for node in nodes for index in range(self.lengths[node])]

    def users(self, node: int) -> list[int]:
        return [number for number, deepest in enumerate(self.node_of_sequence) if node in self.path(deepest)]

    def find(self) -> SharedBlocks:
        indices = range(len(self.parents))
        end_blocks = [sum(self.lengths[node] for node in self.path(index)) for index in indices]
        num_sequences = [len(self.users(index)) if index else 1_000_000 for index in indices]
        return find_shared_blocks(
            np.array(self.node_of_sequence, np.int32),
            np.array(self.end_steps, np.int64),
            SimpleNamespace(
                parents=np.array(self.parents, np.int32),
                end_blocks=np.array(end_blocks, np.int32),
                num_sequences=np.array(num_sequences, np.int32),
            ),
        )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Trees of up to 12 nodes, chains or bushy. The order of the indices is random, independent of depth."""
    size = draw(st.integers(1, 12))
    parents = [0] + [
        draw(st.integers(max(0, node - draw(st.sampled_from([1, 12]))), node - 1)) for node in range(1, size)
    ]
    new_indices = [0, *draw(st.permutations(range(1, size)))]
    shuffled = [0] * size
    for node, parent in enumerate(parents):
        shuffled[new_indices[node]] = new_indices[parent]
    lengths = [0] + [draw(st.integers(1, 3)) for _ in range(1, size)]
    sequences = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 30)), max_size=8))
    return Tree(shuffled, lengths, [node for node, _ in sequences], [end for _, end in sequences])


@examples(500)
@given(trees())
def test_shared_blocks_equal_the_blocks_on_at_least_two_paths(tree):
    paths = [set(tree.blocks_of(number)) for number in range(len(tree.node_of_sequence))]
    others = [set().union(*paths[:number], *paths[number + 1 :]) for number in range(len(paths))]
    last_steps = [
        max((tree.end_steps[user] for user in tree.users(node)), default=-1) for node in range(len(tree.parents))
    ]
    nodes = [node for node in range(1, len(tree.parents)) if len(tree.users(node)) >= 2]

    shared = tree.find()

    assert shared.num_shared_blocks.tolist() == [len(path & other) for path, other in zip(paths, others, strict=True)]
    assert shared.last_steps.tolist() == [-1, *last_steps[1:]]
    assert shared.nodes.tolist() == nodes
    assert shared.loads.num_blocks.tolist() == [tree.lengths[node] for node in nodes]
    assert shared.loads.first_steps.tolist() == [0] * len(nodes)
    assert shared.loads.last_steps.tolist() == [last_steps[node] for node in nodes]


@examples(500)
@given(trees(), st.sampled_from([1, 4, 7, 16]), st.integers(0, 5), st.data())
def test_own_plus_shared_blocks_equal_a_count_of_distinct_blocks(tree, page_size, release_delay, data):
    """Each sequence uses the blocks of its path, followed by blocks of its own that it fills by decoding."""
    num_sequences = len(tree.node_of_sequence)
    tails = [data.draw(st.integers(0, 20)) for _ in range(num_sequences)]
    starts = [min(data.draw(st.sampled_from([0, 0, 3])), end) for end in tree.end_steps]
    expected = []
    for now in range(40):
        in_use: set[tuple[str | int, ...]] = set()
        for number, end in enumerate(tree.end_steps):
            if now <= end + release_delay:
                num_tokens = tails[number] + sum(1 for step in range(1, now + 1) if starts[number] < step <= end)
                in_use |= {("tree", *block) for block in tree.blocks_of(number)}
                in_use |= {("tail", number, position // page_size) for position in range(num_tokens)}
        expected.append(len(in_use))

    delayed = Tree(tree.parents, tree.lengths, tree.node_of_sequence, [end + release_delay for end in tree.end_steps])
    shared = delayed.find()
    num_path_blocks = np.array([len(tree.blocks_of(number)) for number in range(num_sequences)], np.int64)
    num_tokens = (num_path_blocks - shared.num_shared_blocks) * page_size + np.array(tails, np.int64)
    start_steps = np.array(starts, np.int64)
    loads = SequenceLoads(num_tokens, start_steps, np.array(tree.end_steps, np.int64) - start_steps)
    curve = simulate_kv(loads, shared.loads, page_size, release_delay)

    assert curve.at(np.arange(40)).tolist() == expected
    assert curve.peak == max(expected)


def test_sharing_is_found_along_a_chain_of_1000_nodes():
    depth = 1000
    tree = Tree([0, *range(depth)], [0] + [1] * depth, [depth, depth // 2, 700], [5, 9, 7])

    shared = tree.find()

    assert shared.num_shared_blocks.tolist() == [700, 500, 700]
    assert shared.last_steps.tolist() == [-1] + [9] * 500 + [7] * 200 + [5] * 300
