"""Deltas for streamed sequences while they run: the first token at once, later ones at most every STREAM_SECONDS."""

import math
import time

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.lifecycle import keep_prompt_logprobs, sampled_logprobs, sampled_tokens
from tokasaurus.manager.engine.outputs import make_delta
from tokasaurus.manager.state.engine_state import EngineState

STREAM_SECONDS = 0.02
"""Shortest time between two deltas of a sequence, in seconds. Each delta costs the manager and the server some tens of
microseconds, whatever its number of tokens; at steps of 2 ms, a delta per token would cost more than the step."""


def stream_new_tokens(state: EngineState) -> None:
    """Add deltas for the streamed sequences that have new tokens and are due; note when the next one is due.

    With stop strings, only tokens known not to follow one are sent, because a sent token cannot be withdrawn.
    """
    arrays, now_s = state.slots, time.monotonic()
    interval_s = STREAM_SECONDS if state.options.tuning.coalesces_streams else 0.0
    slots = np.flatnonzero(arrays.is_streamed)
    num_generated = arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]
    num_final = np.where(arrays.has_stops[slots], arrays.num_counted_tokens[slots], num_generated)
    num_new = num_final - arrays.num_streamed_tokens[slots]
    next_s = arrays.streamed_s[slots] + interval_s
    is_due = (num_new > 0) & (next_s <= now_s)
    state.stream_due_s = float(next_s[(num_new > 0) & ~is_due].min(initial=math.inf))
    slots, num_generated, num_final, num_new = (column[is_due] for column in (slots, num_generated, num_final, num_new))
    # Nearly always the blocks have all the new tokens: read those of all sequences together.
    is_last = num_final == num_generated
    token_ids = _read(state, slots, num_new, num_final, is_last, state.blocks.tokens, arrays.last_tokens)
    logprobs: list[float] | None = None
    if state.block_logprobs is not None:
        logprobs = _read(state, slots, num_new, num_final, is_last, state.block_logprobs, state.last_logprobs)
    ends = np.cumsum(num_new)
    for slot, generated, final, start, end in zip(
        *(column.tolist() for column in (slots, num_generated, num_final, ends - num_new, ends)), strict=True
    ):
        sequence = state.sequences[slot]
        assert sequence is not None
        keep_prompt_logprobs(state, sequence)
        num_sent, num_kept = sequence.num_streamed_tokens, len(sequence.kept_token_ids)
        want_logprobs = sequence.request.want_logprobs
        new_logprobs: list[float] | None = None
        if num_sent >= num_kept:
            new_ids = token_ids[start:end]
            if want_logprobs:
                assert logprobs is not None
                new_logprobs = logprobs[start:end]
        else:  # tokens kept over a preemption are not where the slot's own tokens are
            most = generated - num_kept
            new_ids = (sequence.kept_token_ids[num_sent:] + sampled_tokens(state, sequence, most).tolist())[
                : end - start
            ]
            if want_logprobs:
                own = sampled_logprobs(state, sequence, most).tolist()
                new_logprobs = (sequence.kept_logprobs[num_sent:] + own)[: end - start]
        state.deltas.append(make_delta(sequence, new_ids, new_logprobs, None))
        sequence.num_streamed_tokens = final
    arrays.num_streamed_tokens[slots] = num_final
    arrays.streamed_s[slots] = now_s


def _read(
    state: EngineState,
    slots: NDArray[np.int64],
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    is_last: NDArray[np.bool_],
    by_block: NDArray,  # type: ignore[type-arg]
    newest: NDArray,  # type: ignore[type-arg]
) -> list:  # type: ignore[type-arg]
    """The entries of `by_block` [blocks, page_size] for some sampled tokens of each slot, one slot after another.

    counts, ends: how many tokens of each slot, and the number of its sampled tokens up to the last of these. is_last:
    that is the slot's newest token, which may have no block yet, so it is read from `newest` [slots].
    """
    if not len(slots):
        return []
    arrays, page_size = state.slots, state.options.limits.page_size
    lasts = np.cumsum(counts)
    first_positions = arrays.num_prompt_tokens[slots] + ends - counts
    positions = np.arange(lasts[-1]) + np.repeat(first_positions - (lasts - counts), counts)
    rows = np.repeat(slots, counts)
    values = by_block[arrays.block_tables[rows, positions // page_size], positions % page_size]
    values[lasts[is_last] - 1] = newest[slots[is_last]]
    found: list = values.tolist()  # type: ignore[type-arg]
    return found
