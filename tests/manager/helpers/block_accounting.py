"""Checks which sequence owns each block and each slot, one by one."""

from collections import Counter

import numpy as np

from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence


def block_table(state: EngineState, sequence: Sequence) -> list[int]:
    """All blocks of a running sequence, in token order."""
    num_blocks, remainder = divmod(int(state.slots.num_covered_tokens[sequence.slot]), state.options.limits.page_size)
    assert remainder == 0
    table: list[int] = state.slots.block_tables[sequence.slot].tolist()
    assert not any(table[num_blocks:]), "only padding may follow the blocks"
    return table[:num_blocks]


def tree_nodes(state: EngineState) -> list[PrefixNode]:
    """All nodes of the prefix tree below its root."""
    nodes, stack = [], [state.blocks.tree.root]
    while stack:
        children = list(stack.pop().children.values())
        nodes += children
        stack += children
    return nodes


def path_of(state: EngineState, sequence: Sequence) -> list[PrefixNode]:
    """The nodes that a running sequence uses, from the root (excluded) to its deepest node."""
    node, path = sequence.node, []
    assert node is not None
    while node is not state.blocks.tree.root:
        path.append(node)
        node = node.parent
    return path[::-1]


def assert_each_block_has_one_owner(state: EngineState) -> None:
    """Every block is free, in the tree, owned by exactly one sequence, or in the set of a block of tokens; the block
    counters are right; and every slot is free or runs exactly one sequence."""
    blocks, tree = state.blocks, state.blocks.tree
    running = [sequence for sequence in state.slots.sequences if sequence is not None]
    nodes = tree_nodes(state)
    users: Counter[int] = Counter()
    own: list[int] = []
    for sequence in running:
        table, path = block_table(state, sequence), path_of(state, sequence)
        assert table[: sequence.num_tree_blocks] == [block for node in path for block in node.blocks.tolist()]
        own += table[sequence.num_tree_blocks :]
        users.update(node.index for node in path)
        assert state.slots.sequences[sequence.slot] is sequence
        assert sequence.node is not None
        assert state.slots.nodes[sequence.slot] == sequence.node.index
    cached = [block for node in nodes for block in node.blocks.tolist()]
    free = blocks.allocate(blocks.num_free)
    blocks.free(free)
    sets, num_held = _check_windows(state, running, {*own, *cached})
    assert sorted([*free.tolist(), *own, *cached, *sets]) == list(range(1, blocks.num_blocks + 1))

    num_cached_in_use = 0
    for node in nodes:
        assert node.num_sequences == tree.arrays.num_sequences[node.index] == users[node.index]
        assert node.end_block == tree.arrays.end_blocks[node.index] == node.parent.end_block + len(node.blocks)
        assert tree.arrays.parents[node.index] == node.parent.index
        num_cached_in_use += len(node.blocks) if users[node.index] else 0
    assert tree.num_blocks == len(cached)
    assert blocks.num_used == len(own) + num_cached_in_use + num_held
    assert blocks.num_available == blocks.num_blocks - blocks.num_used
    _check_snapshots(state, running, {*own, *cached})
    _assert_each_sequence_is_in_one_queue(state, running)


def _check_snapshots(state: EngineState, running: list[Sequence], blocks: set[int]) -> None:
    """Each snapshot is free, or of one block: saved, or promised by one sequence. blocks: of tokens."""
    snapshots = state.blocks.snapshots
    if snapshots is None or state.starts_are_stale:
        return
    promised = [block for sequence in running for _, block in sequence.saves]
    holders = Counter(sequence.snapshot_block for sequence in running if sequence.snapshot_block)
    there = np.flatnonzero(snapshots._numbers).tolist()
    assert set(there) <= blocks
    assert sorted(promised) == [block for block in there if not snapshots.is_saved[block]]
    assert sorted(snapshots._numbers[there].tolist() + snapshots._free) == list(range(1, snapshots.num_snapshots + 1))
    assert {block: snapshots.num_holders[block] for block in snapshots.num_holders.nonzero()[0]} == holders
    assert sorted(snapshots._unheld) == [
        block for block in there if snapshots.is_saved[block] and not snapshots.num_holders[block]
    ]


def _check_windows(state: EngineState, running: list[Sequence], blocks: set[int]) -> tuple[list[int], int]:
    """No layer with a window keeps tokens that nobody can read. blocks: of tokens. Returns the blocks of all groups
    with windows, and how many of them are held."""
    windows, slots, page_size = state.blocks.windows, state.slots, state.options.limits.page_size
    if windows is None:
        return [], 0
    holders: Counter[int] = Counter()
    for sequence in running:
        table, first = block_table(state, sequence), int(slots.first_held[sequence.slot])
        num_tokens = int(slots.num_kv_tokens[sequence.slot])
        assert first == max(0, int(windows.groups.first_seen(num_tokens + 1))) // page_size
        holders.update(table[first:])
        end = -(-num_tokens // page_size)
        if sequence.is_open:
            assert windows.are_there(np.array(table[first:end], np.int32)).all(), "a step lacks what it sees"
    assert windows.num_holders.nonzero()[0].tolist() == sorted(holders)
    assert all(windows.num_holders[block] == number for block, number in holders.items())
    there = np.flatnonzero(windows._sets[:, 0])
    assert set(there.tolist()) <= blocks, "of no token"
    is_held = windows.num_holders[there] > 0
    assert windows.is_wanted[there[~is_held]].all(), "nobody reads it"
    assert windows.num_unheld_blocks == int((~is_held).sum()) * windows.groups.num_groups
    assert windows.num_held == int(is_held.sum())
    num_held = int(is_held.sum()) * windows.groups.num_groups
    return windows._sets[there].reshape(-1).tolist(), num_held


def _assert_each_sequence_is_in_one_queue(state: EngineState, running: list[Sequence]) -> None:
    queues, slots = state.queues, state.slots
    busy = [sequence.slot for sequence in running]
    assert sorted([*busy, *state.slots.free]) == list(range(1, state.options.num_slots + 1))
    assert slots.is_running.nonzero()[0].tolist() == sorted(busy)
    waiting = queues.first_waiting(10**6)
    # Of requests whose adapter's turn has come, the next round queues the sequences.
    unqueued = state.adapters._released
    open_requests = [
        samples
        for samples in state.unfinished.values()
        if not state.adapters.is_held(samples) and samples not in unqueued
    ]
    unfinished = [sequence for samples in open_requests for sequence in samples.sequences]
    awaiting_grammar = [
        one for one in unfinished if one.phase is Phase.WAITING and one.has_grammar and one.grammar_matcher is None
    ]
    waiting += awaiting_grammar
    assert len(waiting) == queues.num_waiting
    assert all(sequence.phase is Phase.WAITING and sequence.slot == 0 for sequence in waiting)
    by_phase = {phase: [sequence for sequence in running if sequence.phase is phase] for phase in Phase}
    assert {id(sequence) for sequence in queues.prefilling} == {id(sequence) for sequence in by_phase[Phase.PREFILL]}
    assert sorted(queues.decoding().tolist()) == sorted(sequence.slot for sequence in by_phase[Phase.DECODE])
    assert not by_phase[Phase.WAITING] + by_phase[Phase.FINISHED]
    assert {id(sequence) for sequence in unfinished} == {id(sequence) for sequence in [*running, *waiting]}
    assert len(unfinished) == len(running) + len(waiting)
    for sequence in running:
        slot = sequence.slot
        assert slots.has_grammar[slot] == sequence.has_grammar == (sequence.grammar_matcher is not None)
        if slots.awaits_matcher[slot]:
            assert sequence.phase in (Phase.DECODE, Phase.DRAINING)
        elif sequence.grammar_matcher is not None:
            num_read = len(sequence.grammar_matcher.token_ids)
            assert num_read == slots.num_known_tokens[slot] - slots.num_prompt_tokens[slot], (
                "must read all known tokens"
            )
            assert sequence.phase is Phase.PREFILL or slots.num_known_tokens[slot] == slots.num_kv_tokens[slot] + 1
    assert state.slots.num_with_grammars == sum(sequence.has_grammar for sequence in running)
