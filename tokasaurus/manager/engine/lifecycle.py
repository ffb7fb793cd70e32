"""Admit, preempt and release sequences, and count their tokens.

A running sequence has a slot, blocks and a path in the prefix tree: allocated when it is admitted, freed when it ends
or is preempted. Cached, computed, recomputed and shared tokens are counted when its slot opens, when a prompt chunk is
sent, when prefix groups change, and when it leaves its slot; never for each decoded token.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.microbatches import choose_microbatch
from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode
from tokasaurus.manager.kv_cache.prompt_logprobs import first_position
from tokasaurus.manager.kv_cache.snapshots import Snapshots
from tokasaurus.manager.kv_cache.window_blocks import WindowSets
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Samples, Sequence, make_prompt
from tokasaurus.messages.forward import RoutedExperts


def admit(state: EngineState, sequence: Sequence, cached: PrefixNode | None = None) -> None:
    """Waiting -> prefill: gets a slot, shares every block of its longest cached prefix, and owns blocks for the rest.

    cached: node on the path of that prefix, already acquired for the sequence; the prompt is matched from
    its end on, which finds blocks that sequences admitted since have added. Default: the root.

    The whole blocks of its prompt enter the tree at once, before they are computed. This is safe because prompts are
    computed in the order of admission, so a sequence that shares these blocks is sent later (see `find_starts`).
    Precondition: a free slot and enough available blocks.
    """
    slots, blocks, page_size = state.slots, state.blocks, state.options.limits.page_size
    tree, prompt = blocks.tree, sequence.prompt
    num_tokens = len(prompt)
    cached = tree.root if cached is None else cached
    block_bytes = 4 * page_size
    rest_bytes = prompt.token_bytes[cached.end_block * block_bytes :]
    match = tree.match(rest_bytes, sequence.salt, num_tokens // page_size, start=cached)
    shared = tree.blocks_on_path(match)
    node = tree.acquire(match, current=cached)
    num_tree_blocks = match.num_blocks
    own = blocks.allocate(-(-num_tokens // page_size) - num_tree_blocks, state.next_step_id)
    num_whole = num_tokens // page_size
    if num_whole > num_tree_blocks:
        whole_bytes = prompt.token_bytes[num_tree_blocks * block_bytes : num_whole * block_bytes]
        inserted = tree.insert(node, whole_bytes, own[: num_whole - num_tree_blocks], sequence.salt)
        if inserted is not node:
            node, num_tree_blocks = inserted, num_whole
    sequence.node, sequence.num_tree_blocks, sequence.num_cached_blocks = node, num_tree_blocks, len(shared)
    table = np.concatenate((shared, own))
    tail = prompt.token_ids[num_tree_blocks * page_size :]
    if len(tail):
        blocks.tokens[table[num_tree_blocks], : len(tail)] = tail
    start, first_write = _start(state, sequence, shared)
    adapter = state.adapters.number(sequence.request.adapter)
    slots.open(sequence, table, page_size, choose_microbatch(state, sequence), start, first_write, adapter)
    if blocks.windows is not None:
        slots.first_held[sequence.slot] = first = blocks.windows.first_held(start)
        blocks.windows.hold(table[first:])
        _promise_windows(state, sequence)
    if blocks.snapshots is not None:
        _promise_snapshots(state, sequence, blocks.snapshots)
    sequence.phase = Phase.PREFILL
    if not sequence.admitted_s:
        sequence.admitted_s = time.monotonic()
    state.queues.prefilling[sequence] = None
    _reserve_prompt_logprobs(state, sequence)


def _start(state: EngineState, sequence: Sequence, cached: NDArray[np.int32]) -> tuple[int, int]:
    """First position that the prefill computes, given that the KV of its first blocks, `cached`, will be there: after
    these or, for its logits, at the last token; if prompt logprobs are wanted, the first position whose logits are
    needed; before these where layers with windows lack what they see, or where no states are known. And the first
    position that it writes."""
    page_size = state.options.limits.page_size
    start, first_write = min(len(cached) * page_size, len(sequence.prompt) - 1), len(cached) * page_size
    if sequence.needs_prompt_logprobs:
        assert state.blocks.prompt_logprobs is not None
        num_top = sequence.request.num_top_prompt_logprobs
        start = first_position(state.blocks.prompt_logprobs.num_leading_blocks(cached, num_top), page_size)
    windows, possible = state.blocks.windows, state.blocks.start(cached, start)
    if windows is None:
        return possible, first_write
    if possible < start:
        windows.want_end(cached[: start // page_size])
    # The layers that see all tokens then store again what they had stored there.
    return possible, first_write if windows.will_be(cached[possible // page_size :]).all() else possible


def _promise_windows(state: EngineState, sequence: Sequence) -> None:
    """The sequence, which prefills, will compute what layers with windows keep of the rest of its prompt. They keep the
    end of it for prompts to come."""
    slots, windows, page_size = state.slots, state.blocks.windows, state.options.limits.page_size
    assert windows is not None
    table = slots.block_tables[sequence.slot, : sequence.num_tree_blocks]
    rest = table[int(slots.num_kv_tokens[sequence.slot]) // page_size :]
    windows.is_promised[rest[~windows.is_whole[rest]]] = True
    windows.want_end(table[: len(sequence.prompt) // page_size])


def _promise_snapshots(state: EngineState, sequence: Sequence, snapshots: Snapshots) -> None:
    """Hold the snapshot that a sequence which is new to the worker starts from, and promise those that it will save."""
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    table, start = slots.block_tables[slot], int(slots.num_kv_tokens[slot])
    if start:
        sequence.snapshot_block = int(table[start // page_size - 1])
        snapshots.hold(sequence.snapshot_block)
    wanted = snapshots.wanted(start, int(slots.first_writes[slot]), len(sequence.prompt))
    for position, may_evict in wanted.items():
        block = int(table[position // page_size - 1])
        if position <= sequence.num_tree_blocks * page_size and snapshots.promise(block, may_evict):
            sequence.saves.append((position, block))
    sequence.saves.sort()


def _drop_snapshots(sequence: Sequence, snapshots: Snapshots) -> None:
    """A sequence will not start from what it holds, nor save what it has promised."""
    if sequence.snapshot_block:
        snapshots.drop(sequence.snapshot_block)
    for _, block in sequence.saves:
        snapshots.break_promise(block)
    sequence.snapshot_block, sequence.saves = 0, []


def _reserve_prompt_logprobs(state: EngineState, sequence: Sequence) -> None:
    """If the sequence computes prompt logprobs, let later prompts rely on them for its whole blocks."""
    if sequence.needs_prompt_logprobs:
        assert state.blocks.prompt_logprobs is not None
        num_whole = len(sequence.prompt) // state.options.limits.page_size
        table = state.slots.block_tables[sequence.slot, :num_whole]
        state.blocks.prompt_logprobs.reserve(table, sequence.request.num_top_prompt_logprobs)


def sampled_tokens(state: EngineState, sequence: Sequence, max_tokens: int | None = None) -> NDArray[np.int32]:
    """Known tokens that a sequence has sampled since its admission, int32 [G]: the last `max_tokens`, if set."""
    tokens = _per_sampled_token(state, sequence, state.blocks.tokens, max_tokens)
    if len(tokens):
        tokens[-1] = state.slots.last_tokens[sequence.slot]
    return tokens


def all_tokens(state: EngineState, sequence: Sequence) -> list[int]:
    """Known tokens that a running sequence has sampled, those before a preemption included."""
    token_ids: list[int] = sampled_tokens(state, sequence).tolist()
    return sequence.kept_token_ids + token_ids


def last_tokens(state: EngineState, sequence: Sequence, count: int) -> list[int]:
    """The last `count` known tokens that a sequence has sampled, or all if it has fewer; it may be waiting."""
    if count == 0:
        return []
    token_ids: list[int] = []
    if sequence.phase is not Phase.WAITING:
        token_ids = sampled_tokens(state, sequence, count).tolist()
    num_missing = count - len(token_ids)
    return sequence.kept_token_ids[-num_missing:] + token_ids if num_missing > 0 else token_ids


def next_mask(state: EngineState, sequence: Sequence) -> NDArray[np.uint32]:
    """[words], which tokens may follow all known ones: by its grammar, its token filter, or both.

    Precondition: it has one of them."""
    filtered = None
    if sequence.token_masks is not None:
        filtered = sequence.token_masks.mask(last_tokens(state, sequence, sequence.token_masks.num_read_tokens))
    if not sequence.has_grammar:
        assert filtered is not None
        return filtered
    assert sequence.grammar_matcher is not None
    return sequence.grammar_matcher.mask if filtered is None else sequence.grammar_matcher.mask & filtered


def all_logprobs(state: EngineState, sequence: Sequence) -> list[float]:
    """Logprobs of `all_tokens`. Precondition: the request wants logprobs."""
    assert state.blocks.sampled_logprobs is not None, "a sequence wants logprobs, but none are stored"
    logprobs = _per_sampled_token(state, sequence, state.blocks.sampled_logprobs)
    if len(logprobs):
        logprobs[-1] = state.slots.last_logprobs[sequence.slot]
    own: list[float] = logprobs.tolist()
    return sequence.kept_logprobs + own


def _per_sampled_token(
    state: EngineState, sequence: Sequence, by_block: NDArray[Any], max_tokens: int | None = None
) -> NDArray[Any]:
    """A copy of the entries of `by_block` [blocks, page_size] for the last `max_tokens` sampled tokens, or all.

    The last entry may be invalid: the newest token may have no block yet.
    """
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    num_known, first = int(slots.num_known_tokens[slot]), int(slots.num_prefill_tokens[slot])
    if max_tokens is not None:
        first = max(first, num_known - max_tokens)
    first_block = first // page_size
    table = slots.block_tables[slot, first_block : -(-num_known // page_size)]
    return by_block[table].reshape(-1)[first - first_block * page_size : num_known - first_block * page_size]


def keep_prompt_logprobs(state: EngineState, sequence: Sequence) -> None:
    """Copy the prompt logprobs from the blocks to the sequence, if it computes them.

    Precondition: its first token is known, so the results of its whole prompt are back.
    """
    if sequence.needs_prompt_logprobs:
        assert state.blocks.prompt_logprobs is not None
        table, request = state.slots.block_tables[sequence.slot], sequence.request
        sequence.prompt_logprobs = state.blocks.prompt_logprobs.read(
            table, len(request.prompt_ids), request.num_top_prompt_logprobs
        )
        sequence.needs_prompt_logprobs = False


def experts_of(state: EngineState, sequence: Sequence, num_sampled: int) -> RoutedExperts | None:
    """A copy of the experts of a running sequence's prompt and of its first num_sampled tokens but the last, those of
    before a preemption as they were; None if they are not wanted. Precondition: these tokens are known."""
    if not sequence.request.want_experts:
        return None
    assert state.blocks.experts is not None, "the steps of its prompt have returned experts"
    num_tokens, page_size = len(sequence.request.prompt_ids) + num_sampled - 1, state.options.limits.page_size
    table = state.slots.block_tables[sequence.slot, : -(-num_tokens // page_size)]
    by_block: RoutedExperts = state.blocks.experts[table]
    experts: RoutedExperts = by_block.reshape(-1, *by_block.shape[2:])[:num_tokens]
    if sequence.kept_experts is not None:  # what is computed again, with other weights perhaps, is not what was sampled
        experts[: len(sequence.kept_experts)] = sequence.kept_experts[:num_tokens]
    return experts


def release(state: EngineState, sequence: Sequence, keep_kv: bool = True) -> None:
    """End a sequence in any phase: its slot and blocks are freed at once, and the state no longer refers to it.

    keep_kv: its computed blocks enter the prefix tree.
    """
    if sequence.phase is Phase.WAITING:
        state.queues.drop_waiting(sequence)
    else:
        _free_slot_and_blocks(state, sequence, keep_kv)
        sequence.phase = Phase.FINISHED
    samples = state.unfinished[sequence.request.request_id]
    del samples.sequences[sequence]
    if not samples.sequences and not samples.num_to_create:
        del state.unfinished[sequence.request.request_id]
        state.step_totals.num_finished_requests += not samples.is_cancelled
        note_end(state, samples)


def note_end(state: EngineState, samples: Samples) -> None:
    """A request has no sequences left."""
    if samples.request.adapter:
        state.adapters.end(samples)


def preempt(state: EngineState, sequence: Sequence) -> None:
    """Move a prefilling or decoding sequence to the front of the waiting queue. Its sampled tokens become prefill.

    Results of steps in flight are discarded. The same tokens are sampled again later, because the sampling noise
    depends only on seed, sample and position, and the grammar matcher has read exactly the known tokens.
    Precondition: no grammar matcher is reading the sequence's newest token.
    """
    set_back(state, sequence)
    state.totals.preemptions += 1


def set_back(state: EngineState, sequence: Sequence) -> None:
    """`preempt`, though no blocks are short."""
    token_ids = sampled_tokens(state, sequence)
    if len(token_ids):
        keep_prompt_logprobs(state, sequence)
        if sequence.request.want_logprobs:
            sequence.kept_logprobs = all_logprobs(state, sequence)
        sequence.kept_experts = experts_of(state, sequence, len(sequence.kept_token_ids) + len(token_ids))
        sequence.kept_token_ids += token_ids.tolist()
        sequence.prompt = make_prompt(np.concatenate((sequence.prompt.token_ids, token_ids)))
    _free_slot_and_blocks(state, sequence)
    state.queues.add_waiting(sequence, first=True)


def _free_slot_and_blocks(state: EngineState, sequence: Sequence, keep_kv: bool = True) -> None:
    """Free the slot and blocks of a running sequence; whole blocks of computed tokens stay in the prefix tree."""
    slots, slot = state.slots, sequence.slot
    if sequence.is_open:
        _count_leaving(state, sequence)
    if state.blocks.windows is not None:
        _drop_windows(state, sequence, state.blocks.windows, keep_kv)
    if state.blocks.snapshots is not None:
        _drop_snapshots(sequence, state.blocks.snapshots)
    if sequence.phase is Phase.PREFILL:
        del state.queues.prefilling[sequence]
    if sequence.phase is Phase.PREFILL or not keep_kv:
        _free_uncomputed(state, sequence)
    else:
        _free_computed(state, sequence)
    state.groups.are_old |= bool(slots.is_decoding[slot])
    slots.close(sequence, state.options.limits.page_size)
    if slots.num_streamed == 0:
        state.stream_due_s = np.inf  # or the manager would go on waking for it


def _drop_windows(state: EngineState, sequence: Sequence, windows: WindowSets, keep_kv: bool) -> None:
    """What layers with windows keep of a sequence that leaves is not needed any more, unless another goes on there."""
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    table = slots.block_tables[slot, : int(slots.num_covered_tokens[slot]) // page_size]
    if keep_kv:
        num_computed = min(int(slots.num_kv_tokens[slot]), int(slots.num_known_tokens[slot])) // page_size
        if sequence.phase is not Phase.PREFILL:
            held = table[int(slots.first_held[slot]) : num_computed]
            windows.note_whole(held[windows.are_there(held)])
        windows.want_end(table[:num_computed])
    state.blocks.drop_windows(table[int(slots.first_held[slot]) :].copy())


def _free_uncomputed(state: EngineState, sequence: Sequence) -> None:
    """Free a sequence's own blocks, and remove tree blocks that are not computed and that no sequence will compute."""
    blocks, tree = state.blocks, state.blocks.tree
    assert sequence.node is not None
    blocks.free(_own_blocks(state, sequence))
    tree.release(sequence.node)
    blocks.free(tree.trim(sequence.node, blocks.is_computed))
    state.starts_are_stale = True


def _free_computed(state: EngineState, sequence: Sequence) -> None:
    """Free the blocks of a sequence past its prefill; its computed whole blocks enter the prefix tree."""
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    blocks, tree, num_tree_blocks = state.blocks, state.blocks.tree, sequence.num_tree_blocks
    assert sequence.node is not None
    own = _own_blocks(state, sequence)
    # Steps in flight write only after the known tokens.
    num_computed = min(int(slots.num_kv_tokens[slot]), int(slots.num_known_tokens[slot])) // page_size - num_tree_blocks
    if num_computed <= 0:
        blocks.free(own)
        tree.release(sequence.node)
        return
    computed = own[:num_computed]
    token_bytes = blocks.tokens[computed].tobytes()
    match = tree.match(token_bytes, sequence.salt, start=sequence.node)
    node = tree.acquire(match, current=sequence.node)
    num_cached = match.num_blocks - num_tree_blocks
    if num_cached < num_computed:
        rest_bytes = token_bytes[4 * page_size * num_cached :]
        node = tree.insert(node, rest_bytes, computed[num_cached:], sequence.salt)
        blocks.is_computed[computed[num_cached:]] = True
    tree.release(node)
    blocks.free(own[num_computed:] if num_cached == 0 else np.concatenate((own[:num_cached], own[num_computed:])))


def _own_blocks(state: EngineState, sequence: Sequence) -> NDArray[np.int32]:
    """A copy of the part of its block table that does not belong to the prefix tree, int32."""
    slots, slot = state.slots, sequence.slot
    num_blocks = int(slots.num_covered_tokens[slot]) // state.options.limits.page_size
    own: NDArray[np.int32] = slots.block_tables[slot, sequence.num_tree_blocks : num_blocks].copy()
    return own


def find_starts(state: EngineState) -> None:
    """Recompute where each prompt that is new to the worker starts, and all reservations of prompt logprobs.

    A prompt starts after the leading blocks that are computed or that an earlier prompt computes. Needed when a
    sequence has left during its prefill, because another must compute what it did not.
    """
    slots = state.slots
    if state.blocks.prompt_logprobs is not None:
        state.blocks.prompt_logprobs.drop_reservations()
    windows, snapshots = state.blocks.windows, state.blocks.snapshots
    if windows is not None:
        windows.is_promised[:] = False
    if snapshots is not None:
        for sequence in state.queues.prefilling:
            if not sequence.is_open:
                _drop_snapshots(sequence, snapshots)
    will_be_computed = state.blocks.is_computed.copy()
    for sequence in state.queues.prefilling:
        table = slots.block_tables[sequence.slot, : sequence.num_tree_blocks]
        if not sequence.is_open:
            is_cached = will_be_computed[table]
            cached = table if is_cached.all() else table[: int(is_cached.argmin())]
            sequence.num_cached_blocks = len(cached)
            start, first_write = _start(state, sequence, cached)
            slots.set_start(sequence.slot, start, first_write)
            if windows is not None:
                held, first = int(slots.first_held[sequence.slot]), windows.first_held(start)
                windows.hold(table[first:held])
                state.blocks.drop_windows(table[held:first].copy())
                slots.first_held[sequence.slot] = first
            if snapshots is not None:
                _promise_snapshots(state, sequence, snapshots)
        if windows is not None:
            _promise_windows(state, sequence)
        _reserve_prompt_logprobs(state, sequence)
        will_be_computed[table] = True
    state.starts_are_stale = False


def count_start(state: EngineState, sequence: Sequence, start: int) -> None:
    """Count a sequence whose slot opens at the worker, with its first `start` tokens cached."""
    counts, totals = sequence.counts, state.totals.tokens
    num_prompt_tokens = len(sequence.request.prompt_ids)
    if sequence.num_cached_tokens is None:
        sequence.num_cached_tokens = start
        counts.asked = num_prompt_tokens
        totals.asked += num_prompt_tokens
        if sequence.index == 0:
            state.totals.prompt_tokens += num_prompt_tokens
    # Never more than the prompt: if tokens of it were sampled, the sequence had the KV of all but the last of them.
    num_cached = max(0, start - sequence.num_kv_tokens_before)
    counts.cached += num_cached
    totals.cached += num_cached


def count_computed(state: EngineState, sequence: Sequence, start: int, end: int) -> None:
    """Count tokens start..end of a sequence, end excluded, as computed by the steps sent. The range may be empty."""
    counts, totals = sequence.counts, state.totals.tokens
    if start < sequence.num_kv_tokens_before:
        first_time = max(start, min(end, sequence.num_kv_tokens_before))
        counts.recomputed += first_time - start
        totals.recomputed += first_time - start
        start = first_time
    num_computed = min(end, len(sequence.request.prompt_ids)) - start
    if num_computed > 0:
        counts.computed += num_computed
        totals.computed += num_computed


def count_shared(state: EngineState, decode: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
    """Count shared prompt tokens in the first step with new prefix groups.

    groups: the group of each slot in `decode`, as in SlotArrays.groups.
    """
    slots = state.slots
    num_tokens = state.groups.num_blocks[groups] * state.options.limits.page_size
    before = slots.num_shared_tokens[decode]
    after = np.maximum(before, np.minimum(num_tokens, slots.num_prompt_tokens[decode]))
    slots.num_shared_tokens[decode] = after
    state.totals.tokens.shared += int((after - before).sum())


def _count_leaving(state: EngineState, sequence: Sequence) -> None:
    """Count the work of a sequence's decode steps when it leaves a slot that is open at the worker."""
    slots, slot = state.slots, sequence.slot
    num_kv_tokens = int(slots.num_kv_tokens[slot])
    if sequence.num_kv_tokens_before:  # otherwise it has decoded each token once
        count_computed(state, sequence, int(slots.num_prefill_tokens[slot]), num_kv_tokens)
    sequence.num_kv_tokens_before = max(sequence.num_kv_tokens_before, num_kv_tokens)
    sequence.counts.shared = int(slots.num_shared_tokens[slot])
