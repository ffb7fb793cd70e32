"""What a running sequence holds: a slot, blocks and a path in the prefix tree. Given when it is admitted, taken back
when it ends or is preempted."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.token_counters import count_leaving
from tokasaurus.manager.kv_cache.prompt_logprobs import first_position
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence, make_prompt
from tokasaurus.manager.state.slot_arrays import NEVER


def admit(state: EngineState, sequence: Sequence) -> None:
    """Waiting -> prefill: gets a slot, shares every block of its longest cached prefix, and owns blocks for the rest.

    The whole blocks of its prompt enter the tree at once, before they are computed: prompts are computed in the order
    of admission, so whoever shares them is not sent to the worker before they are (see `find_starts`).
    The caller has made sure that slot and blocks are there.
    """
    slots, blocks, page_size = state.slots, state.blocks, state.options.limits.page_size
    tree, prompt = blocks.tree, sequence.prompt
    num_tokens = len(prompt)
    # The last token is always computed, for its logits; so its block is never shared.
    match = tree.match(prompt.token_bytes, sequence.salt, (num_tokens - 1) // page_size)
    shared = tree.blocks_on_path(match)
    node = tree.acquire(match)
    num_tree_blocks = match.num_blocks
    own = blocks.allocate(-(-num_tokens // page_size) - num_tree_blocks)
    num_whole = num_tokens // page_size
    if num_whole > num_tree_blocks:
        block_bytes = 4 * page_size
        whole_bytes = prompt.token_bytes[num_tree_blocks * block_bytes : num_whole * block_bytes]
        inserted = tree.insert(node, whole_bytes, own[: num_whole - num_tree_blocks], sequence.salt)
        if inserted is not node:
            node, num_tree_blocks = inserted, num_whole
    slot = state.free_slots.pop()
    table = slots.block_tables[slot]
    table[: match.num_blocks] = shared
    table[match.num_blocks : match.num_blocks + len(own)] = own
    tail = prompt.token_ids[num_tree_blocks * page_size :]
    if len(tail):
        blocks.tokens[table[num_tree_blocks], : len(tail)] = tail
    request = sequence.request
    slots.num_known_tokens[slot] = num_tokens
    slots.num_prompt_tokens[slot] = len(request.prompt_ids)
    slots.num_prefill_tokens[slot] = num_tokens
    slots.max_kv_tokens[slot] = sequence.max_kv_tokens
    slots.num_covered_tokens[slot] = (match.num_blocks + len(own)) * page_size
    slots.admitted_at[slot] = state.num_admissions
    slots.nodes[slot] = node.index
    slots.is_running[slot] = True
    slots.ends_at_eos[slot] = not request.ignore_eos
    if request.stop_token_ids:
        slots.stop_token_ids[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        state.num_with_stop_tokens += 1
    slots.may_stop[slot] = sequence.may_stop
    slots.has_stops[slot] = sequence.stop_matcher is not None
    slots.want_logprobs[slot] = request.want_logprobs
    slots.has_grammar[slot] = sequence.has_grammar
    slots.is_slow[slot] = sequence.grammar_matcher is not None and sequence.grammar_matcher.compiled_grammar.is_slow
    slots.groups[slot] = 0
    slots.num_shared_tokens[slot] = sequence.counts.shared
    slots.stop_rows[slot] = sequence.stop_row
    slots.may_have_stopped[slot] = False
    slots.num_counted_tokens[slot] = len(sequence.kept_token_ids)
    state.num_admissions += 1
    state.num_with_stops += sequence.stop_matcher is not None
    state.num_with_grammars += sequence.has_grammar
    if request.is_streamed:
        state.streaming[sequence] = None
    state.sequences[slot] = sequence
    sequence.slot, sequence.node, sequence.num_tree_blocks = slot, node, num_tree_blocks
    sequence.phase = Phase.PREFILL
    state.queues.prefilling[sequence] = None
    _set_start(state, sequence, match.num_blocks)
    _reserve_scores(state, sequence)


def _set_start(state: EngineState, sequence: Sequence, num_cached_blocks: int) -> None:
    """Where its prefill begins, when the KV of so many blocks will be there: behind them, or where what is scored of
    them ends."""
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    start = slots.first_writes[slot] = num_cached_blocks * page_size
    if sequence.scores_prompt:
        assert state.blocks.scores is not None
        cached = slots.block_tables[slot, :num_cached_blocks]
        num_scored = state.blocks.scores.num_leading_blocks(cached, sequence.request.num_top_prompt_logprobs)
        start = first_position(num_scored, page_size)
    slots.first_positions[slot] = slots.num_kv_tokens[slot] = start


def _reserve_scores(state: EngineState, sequence: Sequence) -> None:
    """Whoever runs after it can read the scores of its whole blocks, if it has any."""
    if sequence.scores_prompt:
        assert state.blocks.scores is not None
        num_whole = len(sequence.prompt) // state.options.limits.page_size
        table = state.slots.block_tables[sequence.slot, :num_whole]
        state.blocks.scores.reserve(table, sequence.request.num_top_prompt_logprobs)


def sampled_tokens(state: EngineState, sequence: Sequence, most: int | None = None) -> NDArray[np.int32]:
    """What a running sequence has sampled since it was admitted, of the results that are back. int32 [G]; with `most`,
    the last of it."""
    tokens = _per_sampled_token(state, sequence, state.blocks.tokens, most)
    if len(tokens):
        tokens[-1] = state.slots.last_tokens[sequence.slot]
    return tokens


def sampled_logprobs(state: EngineState, sequence: Sequence, most: int | None = None) -> NDArray[np.float32]:
    """The log-probabilities of `sampled_tokens`, of a sequence that wants them."""
    assert state.block_logprobs is not None, "log-probabilities are wanted, and none are kept"
    logprobs = _per_sampled_token(state, sequence, state.block_logprobs, most)
    if len(logprobs):
        logprobs[-1] = state.last_logprobs[sequence.slot]
    return logprobs


def _per_sampled_token(state: EngineState, sequence: Sequence, by_block: NDArray, most: int | None) -> NDArray:  # type: ignore[type-arg]
    """A copy of what `by_block` [blocks, page_size] has for the last `most` sampled tokens, or all. The newest may have
    no block yet."""
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    num_known, first = int(slots.num_known_tokens[slot]), int(slots.num_prefill_tokens[slot])
    if most is not None:
        first = max(first, num_known - most)
    first_block = first // page_size
    table = slots.block_tables[slot, first_block : -(-num_known // page_size)]
    return by_block[table].reshape(-1)[first - first_block * page_size : num_known - first_block * page_size]


def keep_prompt_logprobs(state: EngineState, sequence: Sequence) -> None:
    """Of a running sequence that has its first token, and so the results of its whole prompt."""
    if sequence.scores_prompt:
        assert state.blocks.scores is not None
        table, request = state.slots.block_tables[sequence.slot], sequence.request
        sequence.prompt_logprobs = state.blocks.scores.read(
            table, len(request.prompt_ids), request.num_top_prompt_logprobs
        )
        sequence.scores_prompt = False


def release(state: EngineState, sequence: Sequence) -> None:
    """End a sequence in whatever phase it is: slot and blocks are free at once, every trace of it is gone."""
    if sequence.phase is Phase.WAITING:
        state.queues.drop_waiting(sequence)
    else:
        _leave(state, sequence)
        sequence.phase = Phase.FINISHED
    siblings = state.unfinished[sequence.request.request_id]
    del siblings[sequence]
    if not siblings:
        del state.unfinished[sequence.request.request_id]


def preempt(state: EngineState, sequence: Sequence) -> None:
    """A prefilling or decoding sequence waits again, first of all. What it has sampled becomes prefill.

    Results of steps in flight are lost; they come again, for the sampling noise depends on seed, sample and position
    alone, and a grammar has read what is known. None whose newest token is being read may be preempted.
    """
    token_ids = sampled_tokens(state, sequence)
    if len(token_ids):
        keep_prompt_logprobs(state, sequence)
        sequence.kept_token_ids += token_ids.tolist()
        if sequence.request.want_logprobs:
            sequence.kept_logprobs += sampled_logprobs(state, sequence).tolist()
        sequence.prompt = make_prompt(np.concatenate((sequence.prompt.token_ids, token_ids)))
    _leave(state, sequence)
    state.queues.add_waiting(sequence, first=True)
    state.totals.preemptions += 1


def _leave(state: EngineState, sequence: Sequence) -> None:
    """Give back slot and blocks; whole blocks of computed tokens stay in the tree."""
    slots, slot = state.slots, sequence.slot
    if sequence.is_open:
        count_leaving(state, sequence)
    if sequence.phase is Phase.PREFILL:
        del state.queues.prefilling[sequence]
        _free_prefill(state, sequence)
    else:
        _free_computed(state, sequence)
    slots.block_tables[slot, : slots.num_covered_tokens[slot] // state.options.limits.page_size] = 0
    state.groups_are_old |= bool(slots.is_decoding[slot])
    slots.opened_at[slot] = NEVER
    slots.is_running[slot] = slots.is_decoding[slot] = False
    state.num_with_stops -= sequence.stop_matcher is not None
    state.num_with_grammars -= sequence.has_grammar
    slots.has_grammar[slot] = slots.is_held[slot] = False
    if sequence.request.stop_token_ids:
        slots.stop_token_ids[slot] = -1
        state.num_with_stop_tokens -= 1
    if sequence.request.is_streamed:
        del state.streaming[sequence]
    state.sequences[slot] = None
    state.free_slots.append(slot)
    if sequence.is_open:
        state.slots_to_close.append(slot)
    sequence.slot, sequence.node = 0, None
    sequence.is_open = sequence.table_is_sent = False


def _free_prefill(state: EngineState, sequence: Sequence) -> None:
    blocks, tree = state.blocks, state.blocks.tree
    assert sequence.node is not None
    blocks.free(_own_blocks(state, sequence))
    tree.release(sequence.node)
    blocks.free(tree.trim(sequence.node, blocks.is_computed))
    state.starts_are_stale = True


def _free_computed(state: EngineState, sequence: Sequence) -> None:
    slots, slot, page_size = state.slots, sequence.slot, state.options.limits.page_size
    blocks, tree, num_tree_blocks = state.blocks, state.blocks.tree, sequence.num_tree_blocks
    assert sequence.node is not None
    own = _own_blocks(state, sequence)
    # Steps in flight write only behind the tokens that are known.
    num_computed = min(int(slots.num_kv_tokens[slot]), int(slots.num_known_tokens[slot])) // page_size - num_tree_blocks
    if num_computed <= 0:
        blocks.free(own)
        tree.release(sequence.node)
        return
    computed = own[:num_computed]
    token_bytes = blocks.tokens[computed].tobytes()
    match = tree.match(token_bytes, sequence.salt, start=sequence.node)
    node = tree.acquire(match, held=sequence.node)
    num_there = match.num_blocks - num_tree_blocks
    if num_there < num_computed:
        rest_bytes = token_bytes[4 * page_size * num_there :]
        node = tree.insert(node, rest_bytes, computed[num_there:], sequence.salt)
        blocks.is_computed[computed[num_there:]] = True
    tree.release(node)
    blocks.free(own[num_computed:] if num_there == 0 else np.concatenate((own[:num_there], own[num_computed:])))


def _own_blocks(state: EngineState, sequence: Sequence) -> NDArray[np.int32]:
    """A copy of the part of its block table that is not the tree's."""
    slots, slot = state.slots, sequence.slot
    num_blocks = int(slots.num_covered_tokens[slot]) // state.options.limits.page_size
    own: NDArray[np.int32] = slots.block_tables[slot, sequence.num_tree_blocks : num_blocks].copy()
    return own


def find_starts(state: EngineState) -> None:
    """Where the prompts begin that the worker has not seen: behind the blocks that are computed, or that a prompt
    before them computes. Needed when one of them has left: another has to compute what it left undone. And likewise
    for those that are scored."""
    slots = state.slots
    if state.blocks.scores is not None:
        state.blocks.scores.drop_reservations()
    will_be_computed = state.blocks.is_computed.copy()
    for sequence in state.queues.prefilling:
        table = slots.block_tables[sequence.slot, : sequence.num_tree_blocks]
        if not sequence.is_open:
            is_there = will_be_computed[table]
            num_there = len(table) if is_there.all() else int(is_there.argmin())
            _set_start(state, sequence, num_there)
        _reserve_scores(state, sequence)
        will_be_computed[table] = True
    state.starts_are_stale = False
