"""Tests prefix groups against a recursive walk over the tree."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokasaurus.manager.planning.prefix_groups import group_by_prefix


@dataclass
class Tree:
    """A prefix tree; node 0 is the root."""

    parents: list[int]
    lengths: list[int]
    """Blocks of each node."""
    node_of_sequence: list[int]
    """Deepest node of each running sequence."""

    def path(self, node: int) -> list[int]:
        """Nodes from `node` up to the root, without the root."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes

    def end(self, node: int) -> int:
        return sum(self.lengths[ancestor] for ancestor in self.path(node))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = range(len(self.parents))
        num_sequences = [sum(node in self.path(deepest) for deepest in self.node_of_sequence) for node in numbers]
        num_sequences[0] = 2**30
        ends = [self.end(node) for node in numbers]
        return (np.array(self.parents, np.int32), np.array(ends, np.int32), np.array(num_sequences, np.int32))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    num_nodes = draw(st.integers(1, 12))
    parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    lengths = [0] + [draw(st.integers(1, 5)) for _ in range(1, num_nodes)]
    deepest_nodes = draw(st.lists(st.integers(0, num_nodes - 1), max_size=16))
    return Tree(parents, lengths, deepest_nodes)


def walk(tree: Tree, decoding: list[int], min_group_size: int, min_blocks: int) -> dict[int, set[int]]:
    """Members of the group at each node, children first. The definition of prefix groups, one sequence at a time."""
    groups: dict[int, set[int]] = {}

    def visit(node: int) -> set[int]:
        """Forms groups at and below the node; returns its sequences that are in no group."""
        left = {index for index, sequence in enumerate(decoding) if tree.node_of_sequence[sequence] == node}
        for child in range(1, len(tree.parents)):
            if tree.parents[child] == node:
                left |= visit(child)
        if tree.end(node) >= min_blocks and len(left) >= min_group_size:
            groups[node] = left
            return set()
        return left

    visit(0)
    return groups


@settings(max_examples=2000, deadline=None)
@given(trees(), st.data(), st.integers(2, 5), st.integers(1, 8))
def test_groups_equal_those_of_a_depth_first_walk(
    tree: Tree, data: st.DataObject, min_group_size: int, min_blocks: int
):
    decoding = data.draw(
        st.lists(st.sampled_from(range(len(tree.node_of_sequence))), unique=True)
        if tree.node_of_sequence
        else st.just([])
    )
    nodes = np.array([tree.node_of_sequence[sequence] for sequence in decoding], np.int64)
    found = group_by_prefix(nodes, *tree.arrays(), min_group_size, min_blocks)

    expected = walk(tree, decoding, min_group_size, min_blocks)
    members: dict[int, set[int]] = {}
    for index, group in enumerate(found.group_of_sequence.tolist()):
        members.setdefault(group, set()).add(index)
    members.pop(0, None)
    assert sorted(map(sorted, members.values())) == sorted(map(sorted, expected.values()))
    assert found.num_blocks[0] == 0
    assert set(members) == set(range(1, len(found.num_blocks)))
    for node, indices in expected.items():
        (group,) = {int(found.group_of_sequence[index]) for index in indices}
        assert found.num_blocks[group] == tree.end(node)


def test_samples_of_a_question_form_a_group_whose_prefix_includes_the_question():
    """16 questions of 4 blocks each follow a common prefix of 60 blocks; each has 32 samples with a node each."""
    parents, lengths, deepest_nodes = [0, 0], [0, 60], []
    for _ in range(16):
        parents.append(1)
        lengths.append(4)
        question = len(parents) - 1
        for _ in range(32):
            parents.append(question)
            lengths.append(2)
            deepest_nodes.append(len(parents) - 1)
    tree = Tree(parents, lengths, deepest_nodes)
    found = group_by_prefix(np.array(deepest_nodes), *tree.arrays(), 8, 16)
    assert sorted(np.bincount(found.group_of_sequence)[1:].tolist()) == [32] * 16
    assert found.num_blocks.tolist() == [0] + [64] * 16
    larger = group_by_prefix(np.array(deepest_nodes), *tree.arrays(), 33, 16)
    assert larger.num_blocks.tolist() == [0, 60]
    assert (larger.group_of_sequence == 1).all()
