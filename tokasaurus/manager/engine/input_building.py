"""Build the next step: allocate its blocks, advance its sequences, and build the message for the workers."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.lifecycle import count_computed, count_shared, count_start, next_mask
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobChunk, build_prompt_logprobs_input
from tokasaurus.manager.kv_cache.snapshots import Snapshots
from tokasaurus.manager.kv_cache.window_blocks import WindowSets
from tokasaurus.manager.planning.prefix_groups import OPTIMISM, GroupTrial, group_by_prefix, saved_by_step
from tokasaurus.manager.planning.step_times import step_cost, step_features
from tokasaurus.manager.state.engine_state import EngineState, StepInFlight
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.forward import (
    ForwardInput,
    LogitRules,
    PrefixGroups,
    SlotChanges,
    SlotOpens,
    StateSaves,
    TableCopies,
    TokenMasks,
)
from tokasaurus.messages.generation import SAMPLING_DTYPE, GenerateRequest
from tokasaurus.messages.status import HydragenCosts

MIN_COPIED_BLOCKS = 4
"""Fewest leading blocks sent as a block table copy; fewer are listed. A copy takes the bytes of 1.5 listed blocks."""

_NO_END = np.iinfo(np.int32).max
"""End of a bias that applies to every token of the sequence."""


def num_blocks_short(state: EngineState, ready: NDArray[np.int64]) -> int:
    """Missing blocks for one more token of each of the slots `ready`. At most 0 if there are enough."""
    slots = state.slots
    num_needed = int((slots.num_kv_tokens[ready] == slots.num_covered_tokens[ready]).sum())
    return num_needed * state.options.limits.blocks_per_page - state.blocks.num_available


def start_step(
    state: EngineState, microbatch: int, ready: NDArray[np.int64], prefill: list[Sequence], chunks: list[int]
) -> ForwardInput:
    """One token for each of the decoding slots `ready`, then `chunks[i]` tokens of the prompt of `prefill[i]`.

    Precondition: at least one token to compute, and enough available blocks.
    """
    step_id = state.next_step_id
    decode, groups = _in_groups(state, ready, has_prefill=bool(chunks))
    trial = None
    if state.groups.trials is not None and not chunks and len(ready) > 1 and state.groups.trials.is_due():
        decode, groups, trial = _try_the_other(state, decode, groups)
    if state.slots.num_with_adapters:
        decode = _by_adapter(state, decode, 0 if groups is None else int(groups.sizes.sum()))
    block_slots, block_ids = _step_decoding(state, decode)
    logprob_chunks = (
        _build_logprob_chunks(state, prefill, chunks, len(decode)) if state.blocks.prompt_logprobs is not None else []
    )
    prompt_ids, opened, done = _step_prefilling(state, prefill, chunks)
    opens = _build_opens(state, opened)
    saves = (
        None
        if state.blocks.snapshots is None
        else _build_saves(state, state.blocks.snapshots, prefill, chunks, len(decode))
    )
    copies: list[tuple[int, int, int]] = []
    for sequence in opened:
        source_slot, num_copied = _find_table_to_copy(state, sequence)
        sequence.table_is_sent = True
        if num_copied:
            copies.append((sequence.slot, source_slot, num_copied))
        num_blocks = int(state.slots.num_covered_tokens[sequence.slot]) // state.options.limits.page_size
        ids = state.slots.block_tables[sequence.slot, num_copied:num_blocks]
        block_slots.append(np.full(len(ids), sequence.slot, np.int32))
        block_ids.append(ids.copy())
    if state.blocks.windows is not None:
        slots_now = np.concatenate((decode, np.array([sequence.slot for sequence in prefill], np.int64)))
        _give_back_windows(state, state.blocks.windows, slots_now)
    prefill_slots = np.array([sequence.slot for sequence in prefill], np.int64)
    sampled = decode if not done else np.concatenate((decode, np.array(done, np.int64)))
    message = ForwardInput(
        step_id=step_id,
        slots=np.concatenate((decode, prefill_slots)).astype(np.int32),
        num_tokens=np.concatenate((np.ones(len(decode), np.int32), np.array(chunks, np.int32))),
        num_decode=len(decode),
        prompt_ids=np.concatenate(prompt_ids) if prompt_ids else np.empty(0, np.int32),
        changes=SlotChanges(
            closed=np.array(state.slots.closed, np.int32),
            opened=opens,
            block_slots=np.concatenate(block_slots),
            block_ids=np.concatenate(block_ids),
            copies=TableCopies(*np.array(copies, np.int32).T) if copies else None,
            adapters=state.adapters.take_new(),
            windows=None if state.blocks.windows is None else state.blocks.windows.take_new(),
        ),
        groups=groups,
        prompt_logprobs=build_prompt_logprobs_input(logprob_chunks),
        masks=_build_masks(state, sampled) if state.slots.num_with_masks else None,
        microbatch=microbatch,
        saves=saves,
    )
    num_kv_tokens = state.slots.num_kv_tokens[message.slots]
    state.steps_in_flight.append(
        StepInFlight(
            step_id=step_id,
            sampled=sampled,
            microbatch=microbatch,
            num_rows=len(message.slots),
            num_prefill_tokens=len(message.prompt_ids),
            logprob_chunks=logprob_chunks,
            cost=step_cost(message.num_tokens, num_kv_tokens),
            features=step_features(message.num_tokens, num_kv_tokens, len(decode)),
            follows_work=bool(state.steps_in_flight) or state.has_had_work,
            trial=trial,
            expert_tokens=_expert_tokens(state, message) if state.slots.num_with_experts else None,
            begins=[sequence for sequence in map(state.slots.sequence, done) if not sequence.first_token_s],
        )
    )
    _sort_by_phase(state, decode, done)
    state.slots.closed = []
    state.next_step_id += 1
    return message


def _find_table_to_copy(state: EngineState, sequence: Sequence) -> tuple[int, int]:
    """An open slot whose block table starts with the same blocks as the sequence's, and how many; (0, 0) if none.

    Checks the slot that last opened with each prefix tree node of the sequence; another sequence may have it by now.
    """
    tables, slot_of_node = state.slots.block_tables, state.slot_of_node
    found = (0, 0)
    node = sequence.node
    assert node is not None
    while node is not state.blocks.tree.root:
        source_slot = slot_of_node.get(node.index, 0)
        source = state.slots.sequences[source_slot]
        if source is not None and source.table_is_sent and not found[1]:
            end = min(node.end_block, sequence.num_tree_blocks)
            if end >= MIN_COPIED_BLOCKS and (tables[source_slot, :end] == tables[sequence.slot, :end]).all():
                found = (source_slot, end)
        slot_of_node[node.index] = sequence.slot
        node = node.parent
    return found


def _try_the_other(
    state: EngineState, decode: NDArray[np.int64], groups: PrefixGroups | None
) -> tuple[NDArray[np.int64], PrefixGroups | None, GroupTrial | None]:
    """A trial: a step without groups if the usual step has some, otherwise with groups that may save time.

    decode, groups: of the usual step. Returned unchanged, with None for the trial, if there is nothing to try.
    """
    options, trials, tree = state.options.hydragen, state.groups.trials, state.blocks.tree.arrays
    assert options is not None
    assert trials is not None
    trials.begin()
    page_size = state.options.limits.page_size
    if groups is not None:
        return decode, None, _trial(False, groups, options.costs, page_size)
    hoped = options.costs.scaled(trials.scale / OPTIMISM)
    grouping = group_by_prefix(
        state.slots.nodes[decode], tree, options.min_group_size, options.min_blocks, hoped, page_size
    )
    order, groups = _ordered(grouping.group_of_sequence, grouping.num_blocks)
    if groups is None or not _repay_their_step(groups, hoped, page_size):
        return decode, None, None
    return decode[order], groups, _trial(True, groups, options.costs, page_size)


def group_costs(state: EngineState) -> HydragenCosts:
    """Costs of prefix groups: the worker's measurements, corrected by trials."""
    options, trials = state.options.hydragen, state.groups.trials
    assert options is not None
    return options.costs if trials is None else options.costs.scaled(trials.scale)


def _trial(has_groups: bool, groups: PrefixGroups, costs: HydragenCosts, page_size: int) -> GroupTrial:
    alone = float(groups.sizes.astype(np.float64) @ (groups.num_blocks * float(page_size)))
    saved = saved_by_step(groups.sizes, groups.num_blocks, costs, page_size)
    return GroupTrial(has_groups, alone, max(1.0, alone - saved))


def _ordered(
    groups: NDArray[np.int64], num_blocks: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | slice, PrefixGroups | None]:
    """The order in which the members of each group are adjacent and ungrouped rows last, and the groups.

    groups: [N] of each row, 0 for none. num_blocks: by group.
    """
    sizes = np.bincount(groups, minlength=len(num_blocks))
    sizes[0] = 0
    kept = np.flatnonzero(sizes)
    if not len(kept):
        return slice(None), None
    order = np.argsort(np.where(groups == 0, len(sizes), groups), kind="stable")
    return order, PrefixGroups(sizes[kept].astype(np.int32), num_blocks[kept].astype(np.int32))


def _repay_their_step(groups: PrefixGroups, costs: HydragenCosts, page_size: int) -> bool:
    """Whether a decode step should use the groups: if together they save more than its price, or if that is 0."""
    return (
        costs.step_price(len(groups.sizes)) == 0 or saved_by_step(groups.sizes, groups.num_blocks, costs, page_size) > 0
    )


def _in_groups(
    state: EngineState, decode: NDArray[np.int64], has_prefill: bool
) -> tuple[NDArray[np.int64], PrefixGroups | None]:
    """`decode` reordered, with the members of each prefix group adjacent and ungrouped slots last; and the groups.

    has_prefill: whether the step has prompts too.
    """
    if len(state.groups.num_blocks) == 1:
        return decode, None
    groups = state.slots.groups[decode]
    order, shared = _ordered(groups, state.groups.num_blocks)
    page_size = state.options.limits.page_size
    if shared is not None and not has_prefill and not _repay_their_step(shared, group_costs(state), page_size):
        return decode, None
    # With grammars or microbatches, count in every step: some members of a group are not in this one.
    if state.groups.are_new or state.slots.num_with_masks or state.options.num_microbatches > 1:
        count_shared(state, decode, groups)
        state.groups.are_new = False
    return decode[order], shared


def _by_adapter(state: EngineState, decode: NDArray[np.int64], num_grouped: int) -> NDArray[np.int64]:
    """The rows after those of prefix groups, which have an adapter each, in the order of their adapters: the worker
    multiplies adjacent rows with one adapter together."""
    rest = decode[num_grouped:]
    order = np.argsort(state.slots.adapters[rest], kind="stable")
    return np.concatenate((decode[:num_grouped], rest[order]))


def _step_decoding(
    state: EngineState, decode: NDArray[np.int64]
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """Advance `decode` by one token. Returns the slots that get a block and the blocks: lists of one array each."""
    slots, blocks, page_size = state.slots, state.blocks, state.options.limits.page_size
    num_kv_tokens = slots.num_kv_tokens[decode]
    needs_block = num_kv_tokens == slots.num_covered_tokens[decode]
    needy = decode[needs_block]
    new = blocks.allocate(len(needy), state.next_step_id)
    if blocks.windows is not None:
        blocks.windows.hold(new)
        blocks.add_windows(new, state.next_step_id)
    slots.block_tables[needy, num_kv_tokens[needs_block] // page_size] = new
    slots.num_covered_tokens[needy] += page_size
    # The newest token had no block until now. If its result is not back yet, it will be written to this block.
    blocks.tokens[new, 0] = slots.last_tokens[needy]
    if state.blocks.sampled_logprobs is not None:
        state.blocks.sampled_logprobs[new, 0] = state.slots.last_logprobs[needy]
    slots.num_kv_tokens[decode] = num_kv_tokens + 1
    return [needy.astype(np.int32)], [new]


def _step_prefilling(
    state: EngineState, prefill: list[Sequence], chunks: list[int]
) -> tuple[list[NDArray[np.int32]], list[Sequence], list[int]]:
    """Advance each prompt by its chunk.

    Returns the chunks' token ids, the sequences that are new to the worker, and the slots that finish their prefill
    and so sample.
    """
    slots, page_size, is_computed = state.slots, state.options.limits.page_size, state.blocks.is_computed
    prompt_ids: list[NDArray[np.int32]] = []
    opened: list[Sequence] = []
    done: list[int] = []
    for sequence, num_tokens in zip(prefill, chunks, strict=True):
        slot = sequence.slot
        start = int(slots.num_kv_tokens[slot])
        end = start + num_tokens
        if not sequence.is_open:
            opened.append(sequence)
            sequence.is_open = True
            slots.opened_at[slot] = state.next_step_id
            count_start(state, sequence, start)
        count_computed(state, sequence, start, end)
        prompt_ids.append(sequence.prompt.token_ids[start:end])
        slots.num_kv_tokens[slot] = end
        if state.blocks.windows is not None:
            own = slots.block_tables[slot, start // page_size : -(-end // page_size)]
            state.blocks.add_windows(own, state.next_step_id)
            state.blocks.windows.note_whole(own[: end // page_size - start // page_size])
        first_written = max(start, int(slots.first_writes[slot]))
        is_computed[slots.block_tables[slot, first_written // page_size : end // page_size]] = True
        if end == len(sequence.prompt):
            done.append(slot)
    return prompt_ids, opened, done


def _give_back_windows(state: EngineState, windows: WindowSets, slots_now: NDArray[np.int64]) -> None:
    """Slots that the step being built advances no longer need what layers with windows do not see in later steps. Not
    before all blocks of this step are allocated: it still sees them."""
    slots, page_size = state.slots, state.options.limits.page_size
    held = slots.first_held[slots_now]
    firsts = windows.groups.first_seen(slots.num_kv_tokens[slots_now] + 1) // page_size
    past = np.flatnonzero(firsts > held)
    if not len(past):
        return
    counts = (firsts - held)[past]
    columns = np.arange(counts.sum()) + np.repeat(held[past] - np.cumsum(counts) + counts, counts)
    state.blocks.drop_windows(slots.block_tables[np.repeat(slots_now[past], counts), columns])
    slots.first_held[slots_now[past]] = firsts[past]


def _build_logprob_chunks(
    state: EngineState, prefill: list[Sequence], chunks: list[int], num_decode: int
) -> list[PromptLogprobChunk]:
    """The prompt logprobs that the step being built computes, by row."""
    slots, store = state.slots, state.blocks.prompt_logprobs
    assert store is not None
    logprob_chunks = []
    for row, (sequence, num_tokens) in enumerate(zip(prefill, chunks, strict=True), num_decode):
        if sequence.needs_prompt_logprobs:
            slot, num_top = sequence.slot, sequence.request.num_top_prompt_logprobs
            start = int(slots.num_kv_tokens[slot])
            table, token_ids = slots.block_tables[slot], sequence.prompt.token_ids
            part = start, start + num_tokens
            repeats = state.blocks.windows is not None or state.blocks.snapshots is not None
            logprob_chunks.append(store.send_chunk(row, token_ids, table, *part, num_top, may_repeat=repeats))
    return [chunk for chunk in logprob_chunks if len(chunk.kv_indices)]


def _expert_tokens(state: EngineState, step: ForwardInput) -> NDArray[np.int64] | None:
    """kv indices of the tokens of a step, just built, whose requests want experts; None if there are none. Of tokens
    that are not written, which another sequence has computed: in block 0, that nobody reads."""
    slots, page_size = state.slots, state.options.limits.page_size
    wants = slots.want_experts[step.slots]
    if not wants.any():
        return None
    rows, counts = step.slots[wants].astype(np.int64), step.num_tokens[wants].astype(np.int64)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) + np.repeat(slots.num_kv_tokens[rows] - ends, counts)
    of_tokens = np.repeat(rows, counts)
    blocks = slots.block_tables[of_tokens, positions // page_size].astype(np.int64)
    blocks[positions < slots.first_writes[of_tokens]] = 0
    kv_indices: NDArray[np.int64] = blocks * page_size + positions % page_size
    return kv_indices


def _build_masks(state: EngineState, sampled: NDArray[np.int64]) -> TokenMasks | None:
    """Token masks for the step being built, in which the slots `sampled` sample; None if none has a grammar or a
    token filter.

    The slots whose masks depend on their tokens await these from now on.
    """
    rows = np.flatnonzero(state.slots.has_mask[sampled])
    if not len(rows):
        return None
    masks = [next_mask(state, state.slots.sequence(slot)) for slot in sampled[rows].tolist()]
    state.slots.awaits_matcher[sampled[rows]] = state.slots.needs_results[sampled[rows]]
    return TokenMasks(rows.astype(np.int32), np.stack(masks))


def _sort_by_phase(state: EngineState, decode: NDArray[np.int64], done: list[int]) -> None:
    """Update phases after the step: a sequence with no step left drains; one that finished its prefill decodes."""
    slots, queues = state.slots, state.queues
    has_all = slots.num_kv_tokens[decode] == slots.max_kv_tokens[decode]
    state.groups.are_old |= bool(done) or bool(has_all.any())
    if has_all.any():
        drained = decode[has_all]
        slots.is_decoding[drained] = False
        for slot in drained.tolist():
            sequence = state.slots.sequence(slot)
            sequence.phase = Phase.DRAINING
    begin = []
    for slot in done:
        sequence = state.slots.sequence(slot)
        del queues.prefilling[sequence]
        if slots.num_kv_tokens[slot] == slots.max_kv_tokens[slot]:
            sequence.phase = Phase.DRAINING
        else:
            sequence.phase = Phase.DECODE
            begin.append(slot)
    if begin:
        queues.add_decoding(np.array(begin, np.int64))


def _build_opens(state: EngineState, sequences: list[Sequence]) -> SlotOpens | None:
    """The message that opens the slots of `sequences`; None if there are none."""
    if not sequences:
        return None
    slots = np.array([sequence.slot for sequence in sequences], np.int32)
    num_top = np.array([sequence.request.num_top_logprobs for sequence in sequences], np.int32)
    logprobs_as_sampled = np.array([sequence.request.logprobs_mode == "sampled" for sequence in sequences], np.bool_)
    first_positions, first_writes = state.slots.first_positions[slots], state.slots.first_writes[slots]
    snapshots = None
    if (kept := state.blocks.snapshots) is not None:
        snapshots = np.array([kept.number(sequence.snapshot_block) for sequence in sequences], np.int32)
    return SlotOpens(
        slots=slots,
        num_prompt_tokens=state.slots.num_prefill_tokens[slots].astype(np.int32),
        first_positions=first_positions.astype(np.int32),
        sampling=np.array([sequence.request.sampling for sequence in sequences], SAMPLING_DTYPE),
        seeds=np.array([sequence.request.seed for sequence in sequences], np.uint64),
        sample_indices=np.array([sequence.index for sequence in sequences], np.uint32),
        want_logprobs=state.slots.want_logprobs[slots],
        rules=_build_logit_rules(sequences, state.options.eos_ids),
        num_top_logprobs=num_top if num_top.any() else None,
        logprobs_as_sampled=logprobs_as_sampled if logprobs_as_sampled.any() else None,
        want_experts=state.slots.want_experts[slots] if state.slots.want_experts[slots].any() else None,
        first_writes=first_writes.astype(np.int32) if (first_writes != first_positions).any() else None,
        adapters=state.slots.adapters[slots] if state.slots.adapters[slots].any() else None,
        snapshots=snapshots if snapshots is not None and snapshots.any() else None,
    )


def _build_saves(
    state: EngineState, snapshots: Snapshots, prefill: list[Sequence], chunks: list[int], num_decode: int
) -> StateSaves | None:
    """What the step being built keeps of the states of its prompts, which it has advanced; None if nothing. And let go
    of what the sequences start from that it opens: later steps may write there."""
    saves: list[tuple[int, int, int]] = []
    for row, (sequence, num_tokens) in enumerate(zip(prefill, chunks, strict=True), num_decode):
        if sequence.snapshot_block:
            snapshots.drop(sequence.snapshot_block)
            sequence.snapshot_block = 0
        end = int(state.slots.num_kv_tokens[sequence.slot])
        while sequence.saves and sequence.saves[0][0] <= end:
            position, block = sequence.saves.pop(0)
            saves.append((row, position - (end - num_tokens), snapshots.save(block)))
    if not saves:
        return None
    return StateSaves(*np.array(saves, np.int32).T)


def _build_logit_rules(sequences: Iterable[Sequence], eos_ids: frozenset[int]) -> LogitRules | None:
    """Rules for the sequences with logit biases, penalties or min_tokens; None if there are none.

    Precondition: every sequence has a slot.
    """
    ruled = [s for s in sequences if s.request.sampling.has_penalties or s.request.logit_bias or s.request.min_tokens]
    if not ruled:
        return None
    biases = [_biases(sequence.request, eos_ids) for sequence in ruled]
    flat = [bias for own in biases for bias in own]
    return LogitRules(
        slots=np.array([sequence.slot for sequence in ruled], np.int32),
        num_request_tokens=np.array([len(sequence.request.prompt_ids) for sequence in ruled], np.int32),
        bias_counts=np.array([len(own) for own in biases], np.int32),
        bias_ids=np.array([token_id for token_id, _, _ in flat], np.int32),
        bias_values=np.array([value for _, value, _ in flat], np.float32),
        bias_ends=np.array([end for _, _, end in flat], np.int32),
    )


def _biases(request: GenerateRequest, eos_ids: frozenset[int]) -> list[tuple[int, float, int]]:
    """(token id, bias, end) each: a bias applies while prompt and completion together have fewer than `end` tokens."""
    biases = [(token_id, value, _NO_END) for token_id, value in request.logit_bias]
    if request.min_tokens:
        end_ids = {*request.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        end = len(request.prompt_ids) + request.min_tokens
        biases += [(token_id, -np.inf, end) for token_id in sorted(end_ids)]
    return biases
