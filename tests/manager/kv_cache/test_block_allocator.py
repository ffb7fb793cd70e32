"""Tests the allocator against plain lists of the blocks of each sequence."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples, seeds
from tokasaurus.manager.kv_cache.block_allocator import BlockAllocator
from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode

PAGE = 2


@dataclass(eq=False)
class Running:
    """A running sequence."""

    tokens: bytes
    node: PrefixNode
    path: list[int]
    """Blocks in the tree, down to `node`."""
    own: list[int]
    """Blocks after the path, owned by this sequence alone."""


class Pool:
    """An allocator and a model of it: the stack of free blocks and the running sequences; other blocks are cached."""

    def __init__(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks, PAGE)
        self.free = list(range(num_blocks, 0, -1))
        self.running: list[Running] = []

    def used(self) -> set[int]:
        return {block for sequence in self.running for block in sequence.path + sequence.own}

    def cached(self) -> set[int]:
        return set(range(1, self.allocator.num_blocks + 1)) - self.used() - set(self.free)

    def allocate(self, num_blocks: int) -> list[int]:
        cached = self.cached()
        self.allocator.is_computed[:] = True
        allocated = self.allocator.allocate(num_blocks)
        assert allocated.dtype == np.int32
        assert not self.allocator.is_computed[allocated].any()
        assert self.allocator.is_computed.sum() == self.allocator.num_blocks + 1 - num_blocks
        num_from_free = min(num_blocks, len(self.free))
        assert allocated[:num_from_free].tolist() == [self.free.pop() for _ in range(num_from_free)]
        evicted = allocated[num_from_free:].tolist()
        assert len(set(evicted)) == num_blocks - num_from_free
        assert set(evicted) <= cached
        return allocated.tolist()

    def free_blocks(self, blocks: list[int]) -> None:
        self.allocator.free(np.array(blocks, np.int32))
        self.free += reversed(blocks)

    def start(self, tokens: bytes) -> None:
        tree = self.allocator.tree
        match = tree.match(tokens)
        path = tree.blocks_on_path(match).tolist()
        node = tree.acquire(match)
        sequence = Running(tokens, node, path, [])
        self.running.append(sequence)
        num_missing = len(tokens) // (PAGE * 4) - len(path)
        if num_missing <= self.allocator.num_available:
            sequence.own = self.allocate(num_missing)
        else:
            self.finish(sequence)

    def share(self, sequence: Running, num_blocks: int) -> None:
        first, last = len(sequence.path) * PAGE * 4, (len(sequence.path) + num_blocks) * PAGE * 4
        blocks = np.array(sequence.own[:num_blocks], np.int32)
        node = self.allocator.tree.insert(sequence.node, sequence.tokens[first:last], blocks)
        if node is not sequence.node:
            sequence.node = node
            sequence.path += sequence.own[:num_blocks]
            del sequence.own[:num_blocks]

    def finish(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.allocator.tree.release(sequence.node)
        self.free_blocks(sequence.own)

    def cancel(self, sequence: Running) -> None:
        self.finish(sequence)
        is_computed = np.zeros(self.allocator.num_blocks + 1, np.bool_)
        removed = self.allocator.tree.trim(sequence.node, is_computed).tolist()
        assert set(removed) <= set(sequence.path) - self.used()
        self.free_blocks(removed)

    def check(self) -> None:
        allocator, used = self.allocator, self.used()
        own = [block for sequence in self.running for block in sequence.own]
        shared = {block for sequence in self.running for block in sequence.path}
        assert len(own) == len(set(own))
        assert not set(own) & shared
        assert not used & set(self.free)
        assert allocator.num_free == len(self.free)
        assert allocator.num_used == len(used)
        assert allocator.num_available == allocator.num_blocks - len(used)
        assert allocator.tree.num_unused_blocks == len(self.cached())
        for sequence in self.running:
            assert allocator.tree.blocks_on_path(allocator.tree.match(sequence.tokens))[
                : len(sequence.path)
            ].tolist() == (sequence.path)


ACTIONS = ("start", "start", "start", "share", "share", "finish", "cancel")


@examples(700)
@given(
    num_blocks=st.integers(1, 25),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9999)), min_size=20, max_size=40),
)
def test_every_block_is_free_owned_or_cached_and_all_can_be_allocated_at_the_end(num_blocks, actions):
    pool = Pool(num_blocks)
    for action, choice in actions:
        rng = random.Random(choice)
        if action == "start":
            pool.start(np.array(rng.choices((0, 1), weights=(3, 1), k=rng.randrange(16)), np.int32).tobytes())
        elif pool.running:
            sequence = rng.choice(pool.running)
            if action == "share" and sequence.own:
                num_whole = min(len(sequence.own), len(sequence.tokens) // (PAGE * 4) - len(sequence.path))
                pool.share(sequence, rng.randint(1, num_whole))
            elif action == "finish":
                pool.finish(sequence)
            elif action == "cancel":
                pool.cancel(sequence)
        pool.check()
    for sequence in list(pool.running):
        pool.finish(sequence)
    pool.check()
    assert sorted(pool.allocate(num_blocks)) == list(range(1, num_blocks + 1))
    assert pool.allocator.tree.num_blocks == 0


def test_a_new_allocator_has_nothing_computed_and_allocates_blocks_from_1():
    allocator = BlockAllocator(3, PAGE)
    assert (allocator.tokens.shape, allocator.tokens.dtype) == ((4, PAGE), np.int32)
    assert allocator.is_computed.tolist() == [False] * 4
    assert allocator.allocate(0).tolist() == []
    assert allocator.allocate(3).tolist() == [1, 2, 3]


def test_allocating_too_much_or_freeing_twice_fails_an_assertion():
    allocator = BlockAllocator(3, PAGE)
    allocated = allocator.allocate(2)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 available"):
        allocator.allocate(2)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        allocator.free(np.array([0], np.int32))
    with pytest.raises(AssertionError, match="block 2 freed twice"):
        BlockAllocator(3, PAGE).free(np.array([2], np.int32))
    allocator.free(allocated[:1])
    with pytest.raises(AssertionError, match="block 1 freed twice"):
        allocator.free(allocated)
    with pytest.raises(AssertionError, match="block 2 freed twice"):
        allocator.free(allocated[[1, 1]])


@pytest.mark.parametrize("seed", seeds(20))
def test_evicting_for_several_allocations_takes_the_same_blocks(seed):
    """Two equal allocators with cached and free blocks; only one evicts for all allocations at once."""
    rng = random.Random(seed)
    num_blocks, num_cached = 40, rng.randrange(41)
    sizes = [rng.randrange(6) for _ in range(8)]
    while sum(sizes) > num_blocks:
        sizes.pop()
    taken = []
    for evicts_first in (False, True):
        allocator = BlockAllocator(num_blocks, PAGE)
        cached = allocator.allocate(num_cached)
        for start in range(0, num_cached, 3):
            blocks = cached[start : start + 3]
            tokens = np.full(PAGE * len(blocks), start, np.int32).tobytes()
            allocator.tree.release(allocator.tree.insert(allocator.tree.root, tokens, blocks))
        if evicts_first:
            allocator.evict_for(sum(sizes))
            assert allocator.num_free == max(num_blocks - num_cached, sum(sizes))
        assert allocator.num_available == num_blocks
        taken.append([block for size in sizes for block in allocator.allocate(size).tolist()])
        assert allocator.num_available == num_blocks - sum(sizes)
    num_free = num_blocks - num_cached
    assert taken[0][:num_free] == taken[1][:num_free]
    assert sorted(taken[0]) == sorted(taken[1])
