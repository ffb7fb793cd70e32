"""Tests the indices of nodes against a dictionary."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokasaurus.manager.kv_cache.node_arrays import LEAST_SIZE, NodeArrays


def assert_holds(arrays: NodeArrays, expected: dict[int, tuple[int, int, int]]) -> None:
    found = {
        index: (int(arrays.parents[index]), int(arrays.end_blocks[index]), int(arrays.num_sequences[index]))
        for index in expected
    }
    assert found == expected
    assert len(arrays.parents) == len(arrays.end_blocks) == len(arrays.num_sequences)


@settings(max_examples=40, deadline=None)
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
    assert len(arrays.parents) <= LEAST_SIZE


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
