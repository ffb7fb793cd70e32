"""Groups by prefix against a walk over the tree as a picture, one node after the other."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokasaurus.manager.planning.prefix_groups import group_by_prefix


@dataclass
class Tree:
    """Node 0 is the root. lengths: blocks of each node. held: deepest node of each running sequence."""

    parents: list[int]
    lengths: list[int]
    held: list[int]

    def path(self, node: int) -> list[int]:
        """From the node up to the root, without it."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes

    def end(self, node: int) -> int:
        return sum(self.lengths[ancestor] for ancestor in self.path(node))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = range(len(self.parents))
        num_sequences = [sum(node in self.path(held) for held in self.held) for node in numbers]
        num_sequences[0] = 2**30
        ends = [self.end(node) for node in numbers]
        return (np.array(self.parents, np.int32), np.array(ends, np.int32), np.array(num_sequences, np.int32))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    num_nodes = draw(st.integers(1, 12))
    parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    lengths = [0] + [draw(st.integers(1, 5)) for _ in range(1, num_nodes)]
    held = draw(st.lists(st.integers(0, num_nodes - 1), max_size=16))
    return Tree(parents, lengths, held)


def walk(tree: Tree, decoding: list[int], min_group_size: int, min_blocks: int) -> dict[int, set[int]]:
    """Members of the group at each node, children first: the definition, over sequences one by one."""
    groups: dict[int, set[int]] = {}

    def visit(node: int) -> set[int]:
        """The sequences below and at the node that are in no group yet."""
        left = {place for place, sequence in enumerate(decoding) if tree.held[sequence] == node}
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
def test_groups_are_those_of_a_depth_first_walk(tree: Tree, data: st.DataObject, min_group_size: int, min_blocks: int):
    decoding = data.draw(st.lists(st.sampled_from(range(len(tree.held))), unique=True) if tree.held else st.just([]))
    nodes = np.array([tree.held[sequence] for sequence in decoding], np.int64)
    found = group_by_prefix(nodes, *tree.arrays(), min_group_size, min_blocks)

    expected = walk(tree, decoding, min_group_size, min_blocks)
    members: dict[int, set[int]] = {}
    for place, group in enumerate(found.group_of_sequence.tolist()):
        members.setdefault(group, set()).add(place)
    members.pop(0, None)
    assert sorted(map(sorted, members.values())) == sorted(map(sorted, expected.values()))
    assert found.num_blocks[0] == 0
    assert set(members) == set(range(1, len(found.num_blocks)))
    for node, places in expected.items():
        (group,) = {int(found.group_of_sequence[place]) for place in places}
        assert found.num_blocks[group] == tree.end(node)


def test_samples_of_a_question_form_a_group_that_reaches_into_the_question():
    """Sixteen questions behind one prefix of 60 blocks, 4 blocks each, 32 samples with a node of their own each."""
    parents, lengths, held = [0, 0], [0, 60], []
    for _ in range(16):
        parents.append(1)
        lengths.append(4)
        question = len(parents) - 1
        for _ in range(32):
            parents.append(question)
            lengths.append(2)
            held.append(len(parents) - 1)
    tree = Tree(parents, lengths, held)
    found = group_by_prefix(np.array(held), *tree.arrays(), 8, 16)
    assert sorted(np.bincount(found.group_of_sequence)[1:].tolist()) == [32] * 16
    assert found.num_blocks.tolist() == [0] + [64] * 16
    larger = group_by_prefix(np.array(held), *tree.arrays(), 33, 16)
    assert larger.num_blocks.tolist() == [0, 60]
    assert (larger.group_of_sequence == 1).all()
