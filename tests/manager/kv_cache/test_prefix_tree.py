"""Tests the radix tree against a trie of single blocks, each with the set of sequences that use it.

The arrays of nodes are compared with a dictionary."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.manager.kv_cache.prefix_tree import MIN_SIZE, NodeArrays, PrefixMatch, PrefixNode, PrefixTree

PAGE = 2
SALTS = (b"", b"tenant")


@dataclass
class TrieBlock:
    """One block; its key in the trie is its salt and all tokens up to its end."""

    block: int
    users: set[int] = field(default_factory=set)
    """Numbers of the sequences that use it."""
    last_used: int = 0
    """Tick of the release by its last user."""


class Trie:
    """The contract of PrefixTree, block by block."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, tuple[int, ...]], TrieBlock] = {}
        self.tick = 0

    def path(self, salt: bytes, tokens: list[int]) -> list[TrieBlock]:
        path = []
        for end in range(PAGE, len(tokens) + 1, PAGE):
            if (salt, tuple(tokens[:end])) not in self.blocks:
                break
            path.append(self.blocks[salt, tuple(tokens[:end])])
        return path

    def unused_leaves(self) -> list[tuple[bytes, tuple[int, ...]]]:
        parents = {(salt, tokens[:-PAGE]) for salt, tokens in self.blocks}
        return [key for key, block in self.blocks.items() if not block.users and key not in parents]

    def release(self, sequence: int) -> None:
        self.tick += 1
        for block in self.blocks.values():
            if sequence in block.users:
                block.users.remove(sequence)
                if not block.users:
                    block.last_used = self.tick

    def evict(self, num_blocks: int) -> list[int]:
        return [
            self.blocks.pop(min(self.unused_leaves(), key=lambda key: self.blocks[key].last_used)).block
            for _ in range(num_blocks)
        ]

    def trim(self, salt: bytes, tokens: list[int], computed: set[int]) -> set[int]:
        removed = set()
        for end in range(len(tokens), 0, -PAGE):
            key = (salt, tuple(tokens[:end]))
            if key not in self.unused_leaves() or self.blocks[key].block in computed:
                break
            removed.add(self.blocks.pop(key).block)
        return removed


def as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@dataclass
class User:
    """A sequence that uses the tree."""

    number: int
    salt: bytes
    tokens: list[int]
    node: PrefixNode
    """Its deepest node."""
    num_acquired: int = 0
    """Blocks on the path to `node`: the sequence's first blocks."""


class TreeAndTrie:
    """Applies each operation to a tree and to a trie and compares their answers."""

    def __init__(self) -> None:
        self.tree, self.trie = PrefixTree(PAGE), Trie()
        self.users: list[User] = []
        self.next_block = itertools.count(1)
        self.next_user = itertools.count(1)
        self.is_computed = np.zeros(2000, np.bool_)

    def match(self, user: User, max_blocks: int | None = None) -> PrefixMatch:
        suffix = as_bytes(user.tokens[user.num_acquired * PAGE :])
        match = self.tree.match(suffix, user.salt, max_blocks, user.node)
        path = self.trie.path(user.salt, user.tokens)
        limit = len(path) if max_blocks is None else max(user.num_acquired, max_blocks)
        expected = [block.block for block in path][:limit]
        assert match.num_blocks == len(expected)
        assert self.tree.blocks_on_path(match).tolist() == expected
        return match

    def acquire(self, user: User, match: PrefixMatch) -> None:
        user.node = self.tree.acquire(match, None if user.node is self.tree.root else user.node)
        user.num_acquired = match.num_blocks
        for block in self.trie.path(user.salt, user.tokens)[: match.num_blocks]:
            block.users.add(user.number)

    def start(self, salt: bytes, tokens: list[int]) -> User:
        return User(next(self.next_user), salt, tokens, self.tree.root)

    def insert(self, user: User, num_blocks: int) -> None:
        first, last = user.num_acquired * PAGE, (user.num_acquired + num_blocks) * PAGE
        blocks = np.array([next(self.next_block) for _ in range(num_blocks)], np.int32)
        node = self.tree.insert(user.node, as_bytes(user.tokens[first:last]), blocks, user.salt)
        blocks_in_trie = blocks.tolist()
        blocks[:] = -1  # the caller may write to its array afterwards
        if len(self.trie.path(user.salt, user.tokens)) > user.num_acquired:
            assert node is user.node
            return
        for index, block in enumerate(blocks_in_trie):
            end = first + (index + 1) * PAGE
            self.trie.blocks[user.salt, tuple(user.tokens[:end])] = TrieBlock(block, {user.number})
        user.node, user.num_acquired = node, user.num_acquired + num_blocks

    def release(self, user: User) -> None:
        self.tree.release(user.node)
        self.trie.release(user.number)

    def trim(self, user: User) -> None:
        removed = self.tree.trim(user.node, self.is_computed)
        computed = set(np.flatnonzero(self.is_computed).tolist())
        expected = self.trie.trim(user.salt, user.tokens[: user.num_acquired * PAGE], computed)
        assert sorted(removed.tolist()) == sorted(expected)

    def evict(self, num_blocks: int) -> None:
        assert sorted(self.tree.evict(num_blocks).tolist()) == sorted(self.trie.evict(num_blocks))

    def check(self) -> None:
        """The tree contains the blocks of the trie, and its counters and arrays agree with them."""
        tree, found, indices = self.tree, {}, set()
        nodes = [(child, tree.root, b"", 0) for child in tree.root.children.values()]
        for node, parent, before, begin in nodes:
            assert node.parent is parent
            assert len(node.tokens) == len(node.blocks) * PAGE * 4 > 0
            assert node.end_block == begin + len(node.blocks)
            arrays = (
                tree.arrays.parents[node.index],
                tree.arrays.end_blocks[node.index],
                tree.arrays.num_sequences[node.index],
            )
            assert arrays == (parent.index, node.end_block, node.num_sequences)
            assert node.index not in indices | {0}
            indices.add(node.index)
            salt = node.key[: -PAGE * 4] if parent is tree.root else b""
            path = before + salt + node.tokens
            for index, block in enumerate(node.blocks.tolist()):
                end = len(path) - (len(node.blocks) - 1 - index) * PAGE * 4
                found[path[:end]] = (block, node.num_sequences)
            nodes += [(child, node, path, node.end_block) for child in node.children.values()]
        blocks = self.trie.blocks
        assert found == {
            salt + as_bytes(list(tokens)): (block.block, len(block.users)) for (salt, tokens), block in blocks.items()
        }
        assert tree.num_blocks == len(blocks)
        assert tree.num_unused_blocks == sum(not block.users for block in blocks.values())
        assert (tree.arrays.parents[0], tree.arrays.end_blocks[0]) == (0, 0)
        assert tree.arrays.num_sequences[0] > len(self.users)
        for user in self.users:
            assert user.node.end_block == user.num_acquired


OPERATIONS = ("start", "start", "start two", "extend", "insert", "release", "release", "cancel", "evict")


def apply(both: TreeAndTrie, operation: str, choice: int) -> None:
    rng = random.Random(choice)
    users = both.users
    if operation.startswith("start"):
        new = []
        for _ in range(2 if operation == "start two" else 1):
            user = both.start(rng.choice(SALTS), rng.choices((0, 1), weights=(4, 1), k=rng.randrange(16)))
            new.append((user, both.match(user, rng.choice((None, rng.randrange(7))))))
        for user, match in new:  # acquiring the first match may split nodes of the second
            both.acquire(user, match)
            users.append(user)
    elif operation == "evict":
        both.evict(rng.randint(0, both.tree.num_unused_blocks))
    elif users:
        user = users[rng.randrange(len(users))]
        num_left = len(user.tokens) // PAGE - user.num_acquired
        if operation == "extend":
            user.tokens += rng.choices((0, 1), k=rng.randrange(5))
            both.acquire(user, both.match(user, rng.choice((None, user.num_acquired + rng.randrange(-1, 3)))))
        elif operation == "insert" and num_left:
            both.insert(user, rng.randint(1, num_left))
            both.is_computed[user.node.blocks] = rng.choices((True, False), k=len(user.node.blocks))
        elif operation in ("release", "cancel"):
            users.remove(user)
            both.release(user)
            if operation == "cancel":
                both.trim(user)


@examples(600)
@given(operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9999)), min_size=25, max_size=50))
def test_every_operation_agrees_with_a_trie_of_single_blocks(operations):
    both = TreeAndTrie()
    for operation, choice in operations:
        apply(both, operation, choice)
        both.check()
    for user in both.users:
        both.release(user)
    both.users.clear()
    both.check()
    while both.tree.num_blocks:  # one block at a time, to compare the whole eviction order
        both.evict(1)
    both.check()
    assert not both.tree.root.children


@examples(600)
@given(
    prompts=st.lists(st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 1), max_size=14)), max_size=8),
    asked=st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 1), max_size=14)),
    max_blocks=st.none() | st.integers(0, 7),
)
def test_match_is_the_longest_whole_block_prefix_of_the_same_salt(prompts, asked, max_blocks):
    tree, ids, cached = PrefixTree(PAGE), itertools.count(1), {}
    for salt, tokens in prompts:
        node = tree.acquire(tree.match(as_bytes(tokens), salt))
        suffix = tokens[node.end_block * PAGE : len(tokens) // PAGE * PAGE]
        blocks = [next(ids) for _ in range(len(suffix) // PAGE)]
        if blocks:
            for index, block in enumerate(blocks):
                cached[salt, tuple(tokens[: (node.end_block + index + 1) * PAGE])] = block
            tree.insert(node, as_bytes(suffix), np.array(blocks), salt)
    salt, tokens = asked
    keys = [(salt, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]
    expected = [cached[key] for key in itertools.takewhile(cached.__contains__, keys)][:max_blocks]
    match = tree.match(as_bytes(tokens), salt, max_blocks)
    assert tree.blocks_on_path(match).tolist() == expected
    assert match.num_blocks == len(expected)


def test_a_split_keeps_the_deepest_node_of_a_running_sequence():
    tree = PrefixTree(PAGE)
    long = tree.insert(tree.root, as_bytes([1, 2, 3, 4, 5, 6, 7, 8]), np.array([5, 6, 7, 8]))
    short = tree.acquire(tree.match(as_bytes([1, 2, 3, 4, 0, 0])))
    assert (short.blocks.tolist(), long.blocks.tolist()) == ([5, 6], [7, 8])
    assert (short.num_sequences, long.num_sequences) == (2, 1)
    assert long.parent is short
    tree.release(long)
    assert (short.num_sequences, long.num_sequences, tree.num_unused_blocks) == (1, 0, 2)
    middle = tree.acquire(tree.match(as_bytes([1, 2, 3, 4, 5, 6])), current=short)
    assert (middle.parent, long.parent) == (short, middle)
    assert middle.last_used == long.last_used > 0
    assert (short.num_sequences, middle.num_sequences, long.num_sequences) == (1, 1, 0)
    tree.release(middle)
    assert tree.num_unused_blocks == 4


def test_using_one_prefix_many_times_does_not_grow_the_queue_of_unused_leaves():
    tree = PrefixTree(PAGE)
    tree.release(tree.insert(tree.root, as_bytes([1, 2]), np.array([1])))
    for _ in range(1000):
        tree.release(tree.acquire(tree.match(as_bytes([1, 2]))))
    assert len(tree._unused_leaves) < 10
    assert tree.evict(1).tolist() == [1]


def test_new_nodes_reuse_the_indices_of_evicted_nodes():
    tree = PrefixTree(PAGE)
    for first in range(1000):
        tree.release(tree.insert(tree.root, as_bytes([first, 0]), np.array([1])))
        tree.evict(1)
    assert len(tree.arrays.parents) == len(tree.arrays.end_blocks) == len(tree.arrays.num_sequences) == 2


def test_misuse_of_the_tree_fails_an_assertion():
    tree = PrefixTree(PAGE)
    node = tree.insert(tree.root, as_bytes([1, 2, 3, 4]), np.array([1, 2]))
    tree.insert(tree.root, as_bytes([5, 6]), np.array([3]))
    whole = tree.match(as_bytes([1, 2, 3, 4]))
    with pytest.raises(AssertionError, match="not whole blocks"):
        tree.insert(node, as_bytes([1]), np.array([3]))
    with pytest.raises(AssertionError, match="1 blocks asked, 0 unused"):
        tree.evict(1)
    tree.release(node)
    with pytest.raises(AssertionError, match="more often than acquired"):
        tree.release(node)
    tree.evict(1)
    with pytest.raises(AssertionError, match="no longer in the tree"):
        tree.acquire(whole)
    shorter = PrefixMatch(whole.node, 1)
    tree.evict(1)
    with pytest.raises(AssertionError, match="no longer in the tree"):
        tree.acquire(shorter)
    with pytest.raises(AssertionError, match="not on the path"):
        tree.acquire(tree.match(as_bytes([5, 6])), node)


def assert_holds(arrays: NodeArrays, expected: dict[int, tuple[int, int, int]]) -> None:
    found = {
        index: (int(arrays.parents[index]), int(arrays.end_blocks[index]), int(arrays.num_sequences[index]))
        for index in expected
    }
    assert found == expected
    assert len(arrays.parents) == len(arrays.end_blocks) == len(arrays.num_sequences)


@examples(40)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_nodes_keep_their_entries_while_the_arrays_grow_and_shrink(seed, sizes):
    rng = np.random.default_rng(seed)
    arrays, expected = NodeArrays(7), {0: (0, 0, 7)}
    for size in [*sizes, 0]:
        while len(expected) <= size:
            entry = tuple(int(value) for value in rng.integers(0, 1000, 3))
            index = arrays.add(*entry)
            assert index not in expected
            expected[index] = entry
        leaving = rng.permutation([index for index in expected if index])[: len(expected) - 1 - size]
        for index in leaving.tolist():
            arrays.remove(index)
            del expected[index]
        assert_holds(arrays, expected)
    assert len(arrays.parents) <= MIN_SIZE


def test_arrays_shrink_once_lasting_nodes_have_given_way():
    """Old nodes leave and new ones come, as in a cache that evicts what was used least recently."""
    arrays = NodeArrays(1)
    nodes = [arrays.add(0, 1, 1) for _ in range(50_000)]
    assert len(arrays.parents) == 65_536
    for node in nodes[:49_000]:  # the newest remain, at the highest indices
        arrays.remove(node)
    nodes = nodes[49_000:]
    assert len(arrays.parents) == 65_536
    for _ in range(1000):
        nodes.append(arrays.add(0, 1, 1))
        arrays.remove(nodes.pop(0))
    assert len(arrays.parents) < 4 * 1001
