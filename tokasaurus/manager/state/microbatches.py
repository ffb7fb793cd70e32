"""Microbatches: parts of the running sequences, whose steps flow through the pipeline stages one behind another.

A step is of one microbatch, and steps go round the microbatches. Each has about one step under way: its next one needs
the tokens that the last stage samples. With one microbatch, a step has all sequences.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence

_MOST_IN_FLIGHT = 2
"""Steps of one microbatch in flight: the second is queued while the first still runs."""

_PROMPT_TOKENS_OF_ROW = 16
"""Prompt tokens still to be computed that weigh as much as a sequence when a microbatch is chosen: it stays longer."""

_LEAST_CHUNK = 64
"""Prompt tokens that a step may have, even if it has more tokens than others: so that short prompts need not wait."""


def choose_microbatch(state: EngineState, sequence: Sequence) -> int:
    """The microbatch of a sequence that gets a slot.

    That of the request's other samples, which share prefixes, while it has no more than its share of the slots; else
    that with the least to compute, and of equal ones that which is next to be stepped.
    """
    num_microbatches = state.options.num_microbatches
    if num_microbatches == 1:
        return 0
    slots = state.slots
    counts = np.bincount(slots.microbatches[slots.is_running], minlength=num_microbatches)
    siblings = state.unfinished[sequence.request.request_id].sequences
    for sibling in reversed(siblings):
        if sibling is not sequence and sibling.slot and slots.is_running[sibling.slot]:
            own = int(slots.microbatches[sibling.slot])
            if counts[own] < max(1, state.options.num_slots // num_microbatches):
                return own
            break
    num_left = np.where(slots.is_running, _num_prompt_tokens_left(state), 0)
    weights = counts + np.bincount(slots.microbatches, num_left, num_microbatches) / _PROMPT_TOKENS_OF_ROW
    turns = (np.arange(num_microbatches) - state.next_microbatch) % num_microbatches
    return min(range(num_microbatches), key=lambda index: (weights[index], turns[index]))


def _num_prompt_tokens_left(state: EngineState) -> NDArray[np.int64]:
    """Of each slot; 0 once it decodes."""
    num_left: NDArray[np.int64] = np.maximum(0, state.slots.num_prefill_tokens - state.slots.num_kv_tokens)
    return num_left


def even_prefill(state: EngineState, num_decoding: int) -> int:
    """Most prompt tokens for a step with so many decoding rows, so that the steps of a round have equally many tokens.

    A step that is longer than the others leaves stages idle before it and behind it. Precondition: several
    microbatches.
    """
    slots = state.slots
    num_left = int(_num_prompt_tokens_left(state)[slots.is_running].sum())
    num_tokens = int(slots.is_decoding.sum()) + num_left
    return max(_LEAST_CHUNK, -(-num_tokens // state.options.num_microbatches) - num_decoding)


def next_microbatches(state: EngineState, num_unapplied: int) -> Iterator[int]:
    """The microbatches that may get a step, in turns. num_unapplied: steps in flight whose results have arrived."""
    num_microbatches = state.options.num_microbatches
    if num_microbatches == 1:
        yield 0
        return
    most = min(_MOST_IN_FLIGHT, state.options.max_steps_ahead)
    under_way = [step.microbatch for step in islice(state.steps_in_flight, num_unapplied, None)]
    for offset in range(num_microbatches):
        microbatch = (state.next_microbatch + offset) % num_microbatches
        if under_way.count(microbatch) < most:
            yield microbatch


def note_step(state: EngineState, microbatch: int) -> None:
    """A step of this microbatch has been built."""
    state.next_microbatch = (microbatch + 1) % state.options.num_microbatches


def slots_of(state: EngineState, microbatch: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the slots that are of this microbatch."""
    if state.options.num_microbatches == 1:
        return slots
    is_own: NDArray[np.bool_] = state.slots.microbatches[slots] == microbatch
    return slots[is_own]


def prefilling_of(state: EngineState, microbatch: int) -> Iterator[Sequence]:
    """The prompts of this microbatch that may be computed now, in the order of their admission.

    A prompt may start after blocks that an earlier prompt computes. If that is of another microbatch, it waits until
    they are sent; and so it does for prompt logprobs that an earlier prompt of another microbatch may compute for it.
    """
    if state.options.num_microbatches == 1:
        yield from state.queues.prefilling
        return
    slots, page_size, is_computed = state.slots, state.options.limits.page_size, state.blocks.is_computed
    others_want_logprobs = False
    for sequence in state.queues.prefilling:
        slot = sequence.slot
        if slots.microbatches[slot] != microbatch:
            others_want_logprobs |= sequence.needs_prompt_logprobs
            continue
        if not sequence.is_open:
            cached = slots.block_tables[slot, : int(slots.first_writes[slot]) // page_size]
            if not is_computed[cached].all() or (sequence.needs_prompt_logprobs and others_want_logprobs):
                continue
        yield sequence
