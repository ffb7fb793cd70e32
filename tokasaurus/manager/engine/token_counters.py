"""Count cached, computed, recomputed and shared tokens, for each sequence and in total.

Counted when a slot opens, when a prompt chunk is sent, when prefix groups change, and when a sequence leaves its slot;
never for each decoded token.
"""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence


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
    num_tokens = state.group_num_blocks[groups] * state.options.limits.page_size
    before = slots.num_shared_tokens[decode]
    after = np.maximum(before, np.minimum(num_tokens, slots.num_prompt_tokens[decode]))
    slots.num_shared_tokens[decode] = after
    state.totals.tokens.shared += int((after - before).sum())


def count_leaving(state: EngineState, sequence: Sequence) -> None:
    """Count the work of a sequence's decode steps when it leaves a slot that is open at the worker."""
    slots, slot = state.slots, sequence.slot
    num_kv_tokens = int(slots.num_kv_tokens[slot])
    if sequence.num_kv_tokens_before:  # otherwise it has decoded each token once
        count_computed(state, sequence, int(slots.num_prefill_tokens[slot]), num_kv_tokens)
    sequence.num_kv_tokens_before = max(sequence.num_kv_tokens_before, num_kv_tokens)
    sequence.counts.shared = int(slots.num_shared_tokens[slot])
