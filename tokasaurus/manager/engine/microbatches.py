"""Microbatches: parts of the running sequences, whose steps flow through the pipeline stages one behind another.

A step is of one microbatch, and steps go round the microbatches. Each has about one step in flight: its next one needs
the tokens that the last stage samples. With one microbatch, a step has all sequences.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.step_budget import Pipeline
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence

_MAX_IN_FLIGHT = 2
"""Most steps of one microbatch in flight: one runs, the next is queued."""

_MIN_TOGETHER = 8
"""Samples of a request that share a microbatch even if other microbatches have fewer sequences: a step of so few takes
about as long as a step of one."""

_PROMPT_TOKENS_OF_ROW = 16
"""Prompt tokens left to compute that count like one sequence when a microbatch is chosen: a sequence has work for many
steps."""


def choose_microbatch(state: EngineState, sequence: Sequence) -> int:
    """The microbatch of a sequence that gets a slot.

    Samples of a request share a microbatch, because they share prefixes, until it has _MIN_TOGETHER sequences and an
    equal share of all sequences that run or will run soon: waiting ones count as far as the slots and the KV cache can
    hold them. Otherwise it is the microbatch with the least to compute; among equals, the next in turn.
    """
    num_microbatches = state.options.num_microbatches
    if num_microbatches == 1:
        return 0
    slots = state.slots
    counts = np.bincount(slots.microbatches[slots.is_running], minlength=num_microbatches)
    num_running = int(counts.sum()) + 1
    num_fitting = state.blocks.num_blocks // -(-sequence.max_kv_tokens // state.options.limits.page_size)
    num_soon = min(state.options.num_slots, num_running + state.queues.num_waiting, max(num_running, num_fitting))
    share = max(_MIN_TOGETHER, -(-num_soon // num_microbatches))
    siblings = state.unfinished[sequence.request.request_id].sequences
    for sibling in reversed(siblings):
        if sibling is not sequence and sibling.slot and slots.is_running[sibling.slot]:
            own = int(slots.microbatches[sibling.slot])
            if counts[own] < share:
                return own
            break
    num_left = np.bincount(slots.microbatches, _num_prompt_tokens_left(state), num_microbatches)
    weights = counts + num_left / _PROMPT_TOKENS_OF_ROW
    turns = (np.arange(num_microbatches) - state.next_microbatch) % num_microbatches
    return min(range(num_microbatches), key=lambda index: (weights[index], turns[index]))


def _num_prompt_tokens_left(state: EngineState) -> NDArray[np.int64]:
    """[slots] prompt tokens still to compute; 0 for a decoding sequence, and without a sequence."""
    slots = state.slots
    num_left: NDArray[np.int64] = np.maximum(0, slots.num_prefill_tokens - slots.num_kv_tokens) * slots.is_running
    return num_left


def max_prefill(state: EngineState, num_decoding: int) -> int:
    """Most prompt tokens for a step with `num_decoding` decode rows. Precondition: several microbatches."""
    num_all_tokens = int(state.slots.is_decoding.sum() + _num_prompt_tokens_left(state).sum())
    return _pipeline(state).max_prefill(num_decoding, num_all_tokens)


def prefill_per_round(state: EngineState, num_candidate_tokens: NDArray[np.int64]) -> int | None:
    """Expected prompt tokens per round, which has one step of each microbatch; None if microbatches do not limit them.

    num_candidate_tokens: prompt tokens to compute of each sequence that may be admitted; each is assumed to join the
    microbatch with the least to compute.
    """
    num_microbatches, slots = state.options.num_microbatches, state.slots
    if num_microbatches == 1:
        return None
    num_left = _num_prompt_tokens_left(state)
    left: list[int] = np.bincount(slots.microbatches, num_left, num_microbatches).astype(np.int64).tolist()
    decoding: list[int] = np.bincount(slots.microbatches, slots.is_decoding, num_microbatches).astype(np.int64).tolist()
    weights = [rows + tokens / _PROMPT_TOKENS_OF_ROW for rows, tokens in zip(decoding, left, strict=True)]
    for num_tokens in num_candidate_tokens.tolist():
        index = weights.index(min(weights))
        left[index] += num_tokens
        weights[index] += 1 + num_tokens / _PROMPT_TOKENS_OF_ROW
    return _pipeline(state).prefill_per_round(decoding, left)


def _pipeline(state: EngineState) -> Pipeline:
    config = state.options.config
    return Pipeline(config.pp_size, state.options.num_microbatches, config.max_tokens_per_forward)


def next_microbatches(state: EngineState, num_unapplied: int) -> Iterator[int]:
    """The microbatches that may get a step, in turns. num_unapplied: steps in flight whose results have arrived."""
    num_microbatches = state.options.num_microbatches
    if num_microbatches == 1:
        yield 0
        return
    max_in_flight = min(_MAX_IN_FLIGHT, state.options.config.scheduling_steps_ahead)
    in_flight = [step.microbatch for step in islice(state.steps_in_flight, num_unapplied, None)]
    for offset in range(num_microbatches):
        microbatch = (state.next_microbatch + offset) % num_microbatches
        if in_flight.count(microbatch) < max_in_flight:
            yield microbatch


def slots_of(state: EngineState, microbatch: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots of `slots` that belong to this microbatch."""
    if state.options.num_microbatches == 1:
        return slots
    is_own: NDArray[np.bool_] = state.slots.microbatches[slots] == microbatch
    return slots[is_own]


def prefilling_of(state: EngineState, microbatch: int) -> Iterator[Sequence]:
    """The prompts of this microbatch that its next step may compute, in the order of their admission.

    The step must compute each prompt to its end before it takes the next one. A prompt may start after blocks that an
    earlier prompt computes, or rely on prompt logprobs for them. It waits until these blocks are computed by a step
    that was sent, or by this one; states that it starts from, by a step that was sent. If it wants prompt logprobs, it
    also waits for all earlier prompts that want some and have the same first block, without which they share none.
    """
    windows, snapshots = state.blocks.windows, state.blocks.snapshots
    if state.options.num_microbatches == 1 and snapshots is None:
        yield from state.queues.prefilling
        return
    slots, page_size, is_computed = state.slots, state.options.limits.page_size, state.blocks.is_computed
    in_this_step: set[int] = set()
    first_blocks_left: set[int] = set()
    """First blocks of the prompts left out of this step that want prompt logprobs."""
    for sequence in state.queues.prefilling:
        slot = sequence.slot
        may_start = slots.microbatches[slot] == microbatch
        if snapshots is not None and sequence.snapshot_block:
            may_start &= bool(snapshots.is_saved[sequence.snapshot_block])
        if may_start and not sequence.is_open:
            cached = slots.block_tables[slot, : sequence.num_cached_blocks]
            is_there = is_computed[cached]
            if windows is not None:
                seen = slice(int(slots.first_held[slot]), int(slots.first_writes[slot]) // page_size)
                is_there[seen] &= windows.is_whole[cached[seen]]
            may_start = in_this_step.issuperset(cached[~is_there].tolist())
            if sequence.needs_prompt_logprobs and len(cached):
                may_start &= int(cached[0]) not in first_blocks_left
        if not may_start:
            if sequence.needs_prompt_logprobs:
                first_blocks_left.add(int(slots.block_tables[slot, 0]))
            continue
        yield sequence
        start, end = int(slots.num_kv_tokens[slot]) // page_size, len(sequence.prompt) // page_size
        in_this_step.update(slots.block_tables[slot, start:end].tolist())
