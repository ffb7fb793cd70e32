"""Tests prefix groups against every way to choose them."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples, seeds
from tokasaurus.manager.planning.prefix_groups import group_by_prefix, saved_by_step
from tokasaurus.messages.status import KV_READS, HydragenCosts

PAGE_SIZE = 4


def tree_arrays(parents: np.ndarray, end_blocks: np.ndarray, num_sequences: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(parents=parents, end_blocks=end_blocks, num_sequences=num_sequences)


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

    def arrays(self) -> SimpleNamespace:
        numbers = range(len(self.parents))
        num_sequences = [sum(node in self.path(deepest) for deepest in self.node_of_sequence) for node in numbers]
        num_sequences[0] = 2**30
        ends = [self.end(node) for node in numbers]
        columns = (self.parents, ends, num_sequences)
        return tree_arrays(*(np.array(column, np.int32) for column in columns))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    num_nodes = draw(st.integers(1, 12))
    parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    lengths = [0] + [draw(st.integers(1, 5)) for _ in range(1, num_nodes)]
    deepest_nodes = draw(st.lists(st.integers(0, num_nodes - 1), max_size=9))
    return Tree(parents, lengths, deepest_nodes)


def group(tree: Tree, decoding: Sequence[int], min_size: int, min_blocks: int, costs: HydragenCosts) -> dict[int, int]:
    """{index in `decoding`: node whose prefix is its group's}, checked as far as any grouping must be right."""
    nodes = np.array([tree.node_of_sequence[sequence] for sequence in decoding], np.int64)
    found = group_by_prefix(nodes, tree.arrays(), min_size, min_blocks, costs, PAGE_SIZE)
    assert found.num_blocks[0] == 0
    node_of: dict[int, int] = {}
    for number, num_blocks in enumerate(found.num_blocks.tolist()[1:], start=1):
        members = np.flatnonzero(found.group_of_sequence == number).tolist()
        assert len(members) >= min_size
        assert num_blocks >= min_blocks
        (shared,) = {
            node
            for node in set.intersection(*(set(tree.path(int(nodes[index]))) for index in members))
            if tree.end(node) == num_blocks
        }
        node_of |= dict.fromkeys(members, shared)
    assert sorted(node_of) == np.flatnonzero(found.group_of_sequence).tolist()
    return node_of


def saved_tokens(tree: Tree, groups: Mapping[int, int], costs: HydragenCosts) -> float:
    """Tokens that groups {sequence: node} save, counted group by group. One group per node."""
    saved = 0.0
    for node, num_rows in Counter(groups.values()).items():
        num_tokens = tree.end(node) * PAGE_SIZE
        alone = num_rows * num_tokens
        together = costs.per_group + costs.per_group_token * num_tokens
        together += num_rows * (costs.per_row + costs.per_row_token * num_tokens)
        saved += alone - together
    return saved


def most_saved(tree: Tree, decoding: Sequence[int], min_size: int, min_blocks: int, costs: HydragenCosts) -> float:
    """Tries every assignment of sequences to the nodes on their paths, or to none."""
    paths = [[0, *tree.path(tree.node_of_sequence[sequence])] for sequence in decoding]
    best = 0.0
    for nodes in itertools.product(*paths):
        groups = {index: node for index, node in enumerate(nodes) if node}
        sizes = Counter(groups.values())
        if all(size >= min_size and tree.end(node) >= min_blocks for node, size in sizes.items()):
            best = max(best, saved_tokens(tree, groups, costs))
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tree, list[int], HydragenCosts]:
    """A tree, the sequences of it that decode, and costs of which some or all matter. A group of one never saves."""
    tree = draw(trees())
    numbers = range(len(tree.node_of_sequence))
    decoding = draw(st.lists(st.sampled_from(numbers), unique=True, max_size=5)) if numbers else []
    per_row_token = draw(st.sampled_from([0.0, 0.0, 0.4, 0.9, 1.1]))
    costs = HydragenCosts(
        per_group=draw(st.sampled_from([0.0, 0.0, 3.25, 17.5])),
        per_group_token=max(0.0, 1.0 - per_row_token) + draw(st.sampled_from([0.0, 0.0, 0.3, 0.7])),
        per_row=draw(st.sampled_from([0.0, 0.0, 1.75, 6.5])),
        per_row_token=per_row_token,
    )
    return tree, decoding, costs


@examples(1000)
@given(cases(), st.integers(1, 6))
def test_groups_save_as_much_as_the_best_of_all_assignments(
    case: tuple[Tree, list[int], HydragenCosts], min_blocks: int
) -> None:
    tree, decoding, costs = case
    groups = group(tree, decoding, 2, min_blocks, costs)
    best = most_saved(tree, decoding, 2, min_blocks, costs)
    assert saved_tokens(tree, groups, costs) == pytest.approx(best, abs=1e-6)


@examples(400)
@given(cases(), st.sampled_from([0.0, 1.0, 10.0, 40.0, 100.0]))
def test_groups_that_repay_their_step_make_it_as_short_as_any_assignment_can(
    case: tuple[Tree, list[int], HydragenCosts], per_step: float
) -> None:
    """With the groups found if they repay per_step, and without groups otherwise: the least total of all choices."""
    tree, decoding, costs = case
    costs = dataclasses.replace(costs, per_step=per_step)
    groups = group(tree, decoding, 2, 1, costs)
    sizes = Counter(groups.values())
    num_blocks = np.array([tree.end(node) for node in sizes], np.int32)
    saved = saved_by_step(np.array(list(sizes.values()), np.int32), num_blocks, costs, PAGE_SIZE)
    assert saved == pytest.approx(saved_tokens(tree, groups, costs) - per_step, abs=1e-6)
    alone = sum(tree.end(tree.node_of_sequence[sequence]) * PAGE_SIZE for sequence in decoding)
    least = alone - most_saved(tree, decoding, 2, 1, costs) + per_step
    assert alone - max(0.0, saved) == pytest.approx(min(alone, least), abs=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "is_worth_it"), [(4, 256, False), (64, 256, False), (1024, 1024, True), (32, 4096, True)]
)
def test_few_rows_or_tokens_do_not_repay_a_step_in_pieces(num_rows: int, num_tokens: int, is_worth_it: bool) -> None:
    """A millisecond, if a row reads 50 million tokens a second."""
    costs = HydragenCosts(per_group=100.0, per_row=2.0, per_row_token=0.02, per_step=50_000.0)
    sizes, num_blocks = np.array([num_rows], np.int32), np.array([num_tokens // PAGE_SIZE], np.int32)
    assert (saved_by_step(sizes, num_blocks, costs, PAGE_SIZE) > 0) is is_worth_it
    unpriced = dataclasses.replace(costs, per_step=0.0)
    assert saved_by_step(sizes, num_blocks, unpriced, PAGE_SIZE) == pytest.approx(costs.saved(num_rows, num_tokens))


def test_a_step_of_few_enough_groups_for_one_graph_has_a_price_of_its_own() -> None:
    costs = HydragenCosts(per_row=2.0, per_step=50_000.0, per_recorded_step=3_000.0, recorded_groups=4).scaled(2.0)
    of_group = costs.saved(8, 1024)
    for num_groups, price in ((1, 6_000.0), (4, 6_000.0), (5, 100_000.0)):
        sizes, num_blocks = (np.full(num_groups, number, np.int32) for number in (8, 1024 // PAGE_SIZE))
        saved = saved_by_step(sizes, num_blocks, costs, PAGE_SIZE)
        assert saved == pytest.approx(num_groups * of_group - price)


def most_saved_by_any_nodes(tree: Tree, costs: HydragenCosts) -> float:
    """Tries every set of nodes with a group; each sequence joins the one that saves it most tokens, or none."""

    def saved_by_row(node: int) -> float:
        num_tokens = tree.end(node) * PAGE_SIZE
        return num_tokens * (1 - costs.per_row_token) - costs.per_row

    numbers = range(1, len(tree.parents))
    rows = Counter(tree.node_of_sequence)
    saved = {node: saved_by_row(node) for node in numbers}
    cost = {node: costs.per_group + costs.per_group_token * tree.end(node) * PAGE_SIZE for node in numbers}
    paths = {node: tree.path(node) for node in rows}
    return max(
        sum(
            count * max([0.0, *(saved[above] for above in paths[node] if above in chosen)])
            for node, count in rows.items()
        )
        - sum(cost[node] for node in chosen)
        for size in range(len(tree.parents))
        for chosen in map(set, itertools.combinations(numbers, size))
    )


@pytest.mark.parametrize("seed", seeds(150))
def test_groups_of_larger_trees_save_as_much_as_the_best_set_of_nodes(seed: int) -> None:
    """Trees where groups of a question, of a chapter and of all compete."""
    rng = random.Random(seed)
    parents, lengths = [0, 0], [0, rng.randint(1, 60)]
    while len(parents) < 9:
        parents.append(rng.randint(max(1, len(parents) - 4), len(parents) - 1))
        lengths.append(rng.randint(1, rng.choice([2, 10, 40])))
    deepest_nodes = [node for node in range(1, 9) for _ in range(rng.choice([0, 1, 2, 3, 5, 12]))]
    tree = Tree(parents, lengths, deepest_nodes)
    costs = HydragenCosts(rng.choice([0.0, 20.0]), 1.0, rng.choice([0.0, 9.0]), rng.choice([0.0, 0.5]))
    groups = group(tree, range(len(deepest_nodes)), 2, 1, costs)
    assert saved_tokens(tree, groups, costs) == pytest.approx(most_saved_by_any_nodes(tree, costs), abs=1e-6)


@examples(400)
@given(cases(), st.integers(3, 5), st.integers(1, 6))
def test_with_a_minimum_size_groups_are_large_enough_and_none_loses(
    case: tuple[Tree, list[int], HydragenCosts], min_size: int, min_blocks: int
) -> None:
    """`group` checks sizes. The best groups that may also be small are kept where all of them are large enough."""
    tree, decoding, costs = case
    groups = group(tree, decoding, min_size, min_blocks, costs)
    for node in set(groups.values()):
        assert saved_tokens(tree, {index: of for index, of in groups.items() if of == node}, costs) > 0
    unlimited = group(tree, decoding, 2, min_blocks, costs)
    if all(size >= min_size for size in Counter(unlimited.values()).values()):
        assert saved_tokens(tree, groups, costs) == pytest.approx(saved_tokens(tree, unlimited, costs), abs=1e-6)
    assert saved_tokens(tree, groups, costs) <= most_saved(tree, decoding, min_size, min_blocks, costs) + 1e-6


def ask_questions(num_questions: int, num_samples: int, num_common: int, num_own: int) -> Tree:
    """A common prefix of num_common blocks, then each question's num_own blocks; each sample has a node of its own."""
    parents, lengths, deepest_nodes = [0, 0], [0, num_common], []
    for _ in range(num_questions):
        parents.append(1)
        lengths.append(num_own)
        question = len(parents) - 1
        for _ in range(num_samples):
            parents.append(question)
            lengths.append(2)
            deepest_nodes.append(len(parents) - 1)
    return Tree(parents, lengths, deepest_nodes)


def test_samples_of_many_questions_behind_one_long_prefix_form_one_group() -> None:
    """Groups by question would save 3 reads of 266 blocks in 4; one group saves 1,023 reads of 250 blocks in 1,024."""
    tree = ask_questions(num_questions=256, num_samples=4, num_common=250, num_own=16)
    everyone = range(256 * 4)
    groups = group(tree, everyone, 2, 1, KV_READS)
    assert groups == dict.fromkeys(everyone, 1)
    for costs in (HydragenCosts(per_group=50.0), HydragenCosts(per_row=20.0), HydragenCosts(per_row_token=0.5)):
        assert group(tree, everyone, 2, 1, costs) == groups


@pytest.mark.parametrize(
    ("num_samples", "num_common", "num_own", "is_by_question"),
    [
        # Of m samples of a question in their own group, one reads common and own blocks; in the common group, all read
        # their own blocks: by question if common + own < m * own, apart from the single reading of the common blocks.
        (32, 60, 4, True),
        (4, 60, 4, False),
        (15, 60, 4, False),  # 64 < 15 * 4 is false
        (17, 60, 4, True),  # 64 < 17 * 4
        (4, 0, 4, True),
    ],
)
def test_questions_form_groups_of_their_own_if_their_samples_share_enough(
    num_samples: int, num_common: int, num_own: int, is_by_question: bool
) -> None:
    tree = ask_questions(64, num_samples, num_common, num_own)
    groups = group(tree, range(64 * num_samples), 2, 1, KV_READS)
    assert len(groups) == 64 * num_samples
    assert set(Counter(groups.values()).values()) == ({num_samples} if is_by_question else {64 * num_samples})
    assert {tree.end(node) for node in groups.values()} == {num_common + num_own if is_by_question else num_common}


def test_a_question_with_many_samples_keeps_its_group_beside_the_common_one() -> None:
    tree = ask_questions(8, 4, 60, 4)
    many = [tree.parents[tree.node_of_sequence[0]]] * 40
    tree.node_of_sequence += many
    groups = group(tree, range(8 * 4 + 40), 2, 1, KV_READS)
    assert Counter(groups.values()) == {1: 7 * 4, many[0]: 44}


def test_nodes_at_which_no_sequence_joins_do_not_hide_the_node_above_them() -> None:
    """Two conversations of 100 turns each branched once in every turn; the branches have ended."""
    parents, lengths, ends = [0, 0], [0, 500], []
    for _ in range(2):
        for turn in range(100):
            parents.append(len(parents) - 1 if turn else 1)
            lengths.append(1)
        ends.append(len(parents) - 1)
    tree = Tree(parents, lengths, [ends[0]] * 2 + [ends[1]] * 2)
    assert group(tree, range(4), 2, 1, KV_READS) == dict.fromkeys(range(4), 1)
    tree = Tree(parents, [0, 100, *lengths[2:]], [ends[0]] * 2 + [ends[1]] * 2)
    assert group(tree, range(4), 2, 1, KV_READS) == {0: ends[0], 1: ends[0], 2: ends[1], 3: ends[1]}


def test_in_a_tree_as_deep_as_it_has_sequences_the_groups_are_still_found() -> None:
    """2,000 levels, each with two sequences whose question is long: every pair is a group."""
    parents, lengths, deepest_nodes = [0, 0], [0, 1], []
    trunk = 1
    for _ in range(2000):
        parents += [trunk, trunk]
        lengths += [5000, 1]
        deepest_nodes += [len(parents) - 2] * 2
        trunk = len(parents) - 1
    ends = [0] * len(parents)
    num_sequences = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        ends[node] = ends[parents[node]] + lengths[node]
    num_sequences[deepest_nodes] = 2
    for node in range(len(parents) - 1, 0, -1):
        num_sequences[parents[node]] += num_sequences[node]
    num_sequences[0] = 2**30
    arrays = np.array(parents, np.int32), np.array(ends, np.int32), num_sequences
    found = group_by_prefix(np.array(deepest_nodes), tree_arrays(*arrays), 2, 1, KV_READS, PAGE_SIZE)
    assert sorted(np.bincount(found.group_of_sequence).tolist()) == [0] + [2] * 2000
