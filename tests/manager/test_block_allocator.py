"""The allocator against a set of free ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.manager.block_allocator import BlockAllocator


@given(num_blocks=st.integers(1, 20), actions=st.lists(st.integers(-20, 20), max_size=40))
def test_blocks_are_given_once_until_they_are_back(num_blocks, actions):
    allocator = BlockAllocator(num_blocks)
    free, owned = set(range(1, num_blocks + 1)), []
    for action in actions:
        if 0 < action <= len(free):
            taken = allocator.take(action)
            assert len(set(taken)) == action
            assert set(taken) <= free
            free -= set(taken)
            owned.append(taken)
        elif action <= 0 and owned:
            back = owned.pop(action % len(owned))
            allocator.give_back(back)
            free |= set(back)
        assert allocator.num_used == num_blocks - len(free)


def test_our_own_mistakes_are_caught():
    allocator = BlockAllocator(3)
    taken = allocator.take(2)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        allocator.take(2)
    allocator.give_back(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.give_back(taken[:1])
