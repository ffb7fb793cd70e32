"""The way of a token back: apply the results of steps and of the grammar threads, end sequences, and build deltas.

`apply_output` records the tokens of a step and marks the sequences that end. Deltas go to the server when a sequence
ends, and for streamed sequences while they run: the first token at once, later ones at most every STREAM_SECONDS.
"""

import logging
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.lifecycle import (
    all_logprobs,
    all_tokens,
    experts_of,
    keep_prompt_logprobs,
    last_tokens,
    next_mask,
    release,
    sampled_tokens,
)
from tokasaurus.manager.planning.prefix_groups import GroupTrials
from tokasaurus.manager.planning.step_times import IS_OF_DECODE
from tokasaurus.manager.state.engine_state import EngineState, StepInFlight
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.manager.state.slot_arrays import NEVER
from tokasaurus.messages.commands import FIRST_VERSIONS, WeightVersions
from tokasaurus.messages.forward import ForwardOutput, NonfiniteTokens, TopOfRows
from tokasaurus.messages.generation import ErrorCode, FinishReason, SequenceDelta, SequenceTimes
from tokasaurus.text.stop_strings import StopMatcher

logger = logging.getLogger(__name__)

NUMERICAL_ERROR = "the model computed numbers for this request that are not finite (NaN or infinity)"

MAX_RELEASED = 96
"""Most sequences that leave their slots in one step of the manager, so that it takes a few milliseconds. Twice the
number that usually leave may come on top."""

MAX_SPECIAL_TOKENS = 16
"""Most special tokens among the last tokens of a completion. With more, all of it is read for stop strings."""

STREAM_SECONDS = 0.02
"""Shortest time between two deltas of a sequence, in seconds. Each delta costs the manager and the server some tens of
microseconds, whatever its number of tokens; at steps of 2 ms, a delta per token would cost more than the step."""


def apply_output(state: EngineState, output: ForwardOutput) -> None:
    """Apply the result of the oldest step in flight. The sequences that it ends are left to `release_ending`.

    A step may be sent before an earlier result ends one of its sequences. The token of such a sequence is discarded
    and not counted.
    """
    step = state.steps_in_flight.popleft()
    assert step.step_id == output.step_id, f"result of step {output.step_id}, expected {step.step_id}"
    assert len(step.sampled) == len(output.token_ids), f"step {step.step_id}: {len(output.token_ids)} tokens"
    state.step_time_model.note(step.features, output.forward_seconds)
    state.step_seconds = state.step_time_model.predict(step.features * IS_OF_DECODE)
    state.step_times.note(step.cost, output.forward_seconds)
    if state.groups.trials is not None:
        _note_trial(state, state.groups.trials, step, output.forward_seconds)
    state.step_totals.num_steps += 1
    state.step_totals.num_rows += step.num_rows
    state.step_totals.num_prefill_tokens += step.num_prefill_tokens
    state.step_totals.busy_seconds += output.forward_seconds
    if step.follows_work:
        state.step_totals.idle_seconds += output.idle_seconds
    state.totals.recompiles += output.num_recompiles
    state.totals.graph_misses += output.missed_graphs
    state.totals.phase_seconds, state.totals.expert_tokens = output.phase_seconds, output.expert_tokens
    if step.logprob_chunks:
        assert state.blocks.prompt_logprobs is not None
        assert output.prompt_logprobs is not None, f"step {step.step_id}: no prompt logprobs"
        state.blocks.prompt_logprobs.note(step.logprob_chunks, output.prompt_logprobs)
    if step.expert_tokens is not None:
        assert output.experts is not None, f"step {step.step_id}: no experts"
        state.blocks.note_experts(step.expert_tokens, output.experts)
    if output.nonfinite is not None:
        release_all_ending(state)
        _end_nonfinite(state, step, output.nonfinite)
    if step.begins:
        _note_first_tokens(state, step)
    slots, token_ids, logprobs = step.sampled, output.token_ids, output.logprobs
    is_valid = state.slots.opened_at[slots] <= step.step_id
    if output.top is not None:
        _record_top_logprobs(state, slots, is_valid, output.top)
    if output.vectors is not None:
        for row in np.flatnonzero(is_valid).tolist():
            state.slots.sequence(int(slots[row])).vector = output.vectors[row]
    if np.count_nonzero(is_valid) < len(slots):
        slots, token_ids = slots[is_valid], token_ids[is_valid]
        logprobs = None if logprobs is None else logprobs[is_valid]
    num_known = _record_tokens(state, slots, token_ids, logprobs)
    num_with_stops = _mark_for_stop_check(state, slots, token_ids) if state.slots.num_with_stops else 0
    state.totals.generation_tokens += len(slots) - num_with_stops
    stops = np.zeros(len(slots), np.bool_)
    for eos_id in state.options.eos_ids:
        stops |= token_ids == eos_id
    rows = np.flatnonzero(stops)
    stops[rows] = state.slots.ends_at_eos[slots[rows]]
    if state.slots.num_with_stop_tokens:
        stops |= (state.slots.stop_token_ids[slots] == token_ids[:, None]).any(axis=1)
    is_last = num_known > state.slots.max_kv_tokens[slots]
    if state.slots.num_with_masks:
        stops |= _apply_filters(state, slots) & ~is_last
    if state.slots.num_with_grammars:
        is_last &= ~_note_grammar_tokens(state, slots, token_ids, stops)
    ends = np.flatnonzero(stops | is_last)
    if len(ends):
        _mark_ending(state, slots[ends], stops[ends])
    state.last_result_id = step.step_id
    state.has_had_work = True


def _mark_ending(state: EngineState, slots: NDArray[np.int64], is_stop: NDArray[np.bool_]) -> None:
    """Sequences whose last token is known: no step computes them, no task reads them, and they are to be ended.

    slots: int64 [E]. is_stop: bool [E], as for end_sequence.
    """
    arrays = state.slots
    state.groups.are_old |= bool(arrays.is_decoding[slots].any())
    arrays.is_decoding[slots] = arrays.is_streamed[slots] = False
    arrays.has_stops[slots] = arrays.may_have_stopped[slots] = arrays.may_stop[slots] = False
    arrays.opened_at[slots] = NEVER  # results of later steps are discarded
    arrays.max_kv_tokens[slots] = arrays.num_kv_tokens[slots]
    arrays.is_ending[slots] = True
    state.ending.extend(zip(map(arrays.sequence, slots.tolist()), is_stop.tolist(), strict=True))


def release_ending(state: EngineState, num_released: int = 0) -> None:
    """End marked sequences, up to the limit of one step (see MAX_RELEASED); num_released others have left already.

    The rest keep their slots and blocks until a later call. Thousands of sequences may end in the same step, while the
    worker needs its next one within milliseconds.
    """
    _release_ending(state, MAX_RELEASED + int(2 * state.admission.usual_releases) - num_released)


def release_all_ending(state: EngineState) -> None:
    """End every sequence that is marked: its blocks are needed, or may not be in use."""
    _release_ending(state, len(state.ending))


def _release_ending(state: EngineState, max_released: int) -> None:
    while state.ending and max_released > 0:
        sequence, is_stop = state.ending.popleft()
        if sequence.phase is not Phase.FINISHED:  # not cancelled meanwhile
            end_sequence(state, sequence.slot, is_stop)
            max_released -= 1


def _note_trial(state: EngineState, trials: GroupTrials, step: StepInFlight, seconds: float) -> None:
    if trials.note(step.num_rows, step.num_prefill_tokens > 0, step.trial, seconds):
        state.groups.are_old = True
        logger.info("prefix groups: by the times of steps, they cost %.2f times what was measured", trials.scale)


def _note_first_tokens(state: EngineState, step: StepInFlight) -> None:
    """A sequence that has left its slot since gets its first token in a later step, or none."""
    now_s = time.monotonic()
    for sequence in step.begins:
        if sequence.is_open and state.slots.opened_at[sequence.slot] <= step.step_id:
            sequence.first_token_s = now_s


def _mark_for_stop_check(state: EngineState, slots: NDArray[np.int64], token_ids: NDArray[np.int32]) -> int:
    """Mark the sequences whose newest token may complete a stop string.

    Returns the number of sequences with stop strings. Their tokens are counted later, once they are known not to
    follow a stop string.
    """
    arrays = state.slots
    has_stops = arrays.has_stops[slots]
    slots, token_ids = slots[has_stops], token_ids[has_stops]
    stop_tokens = state.options.stop_tokens
    arrays.may_have_stopped[slots] |= (
        True if stop_tokens is None else stop_tokens.may_end[arrays.stop_rows[slots], token_ids]
    )
    state.has_uncounted |= len(slots) > 0
    return len(slots)


def check_stop_strings(state: EngineState) -> None:
    """Check all unchecked sampled tokens for stop strings, and end the sequences that have one.

    Running this less often decodes fewer texts, but samples more tokens that are discarded.
    """
    arrays = state.slots
    for slot in np.flatnonzero(arrays.is_running & arrays.may_have_stopped).tolist():
        sequence = state.slots.sequence(slot)
        assert sequence.stop_matcher is not None
        num_tokens = _find_stop(state, sequence, sequence.stop_matcher)
        if num_tokens is not None:
            token_ids = all_tokens(state, sequence)
            _finish(state, sequence, token_ids[:num_tokens], "stop")
    arrays.may_have_stopped[:] = False
    slots = np.flatnonzero(arrays.is_running & arrays.has_stops)
    num_generated = arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]
    state.totals.generation_tokens += int((num_generated - arrays.num_counted_tokens[slots]).sum())
    arrays.num_counted_tokens[slots] = num_generated
    state.has_uncounted = False


def _find_stop(state: EngineState, sequence: Sequence, matcher: StopMatcher) -> int | None:
    """Number of sampled tokens with which the first stop string among unchecked tokens is complete; None if none is."""
    arrays, slot = state.slots, sequence.slot
    num_generated = int(arrays.num_known_tokens[slot] - arrays.num_prompt_tokens[slot])
    num_checked = int(arrays.num_counted_tokens[slot])
    # Read only the tail: copying a long completion for every check is slow. It suffices if special tokens are few.
    num_read = num_generated - num_checked + matcher.lookback + MAX_SPECIAL_TOKENS
    num_sampled = num_generated - len(sequence.kept_token_ids)
    tail = sampled_tokens(state, sequence, min(num_read, num_sampled)).tolist()
    if num_read > num_sampled:
        tail = sequence.kept_token_ids[-(num_read - num_sampled) :] + tail
    special_ids = state.options.special_ids
    if matcher.needs_whole_text or sum(token_id in special_ids for token_id in tail) > MAX_SPECIAL_TOKENS:
        tail = all_tokens(state, sequence)
    num_before = num_generated - len(tail)
    num_exempt = sequence.request.min_tokens - num_before
    num_tokens = matcher.first_completion(tail, num_checked - num_before, num_exempt, is_whole=num_before == 0)
    return None if num_tokens is None else num_tokens + num_before


def _record_tokens(
    state: EngineState, slots: NDArray[np.int64], token_ids: NDArray[np.int32], logprobs: NDArray[np.float32] | None
) -> NDArray[np.int64]:
    """Write each token to its kv index. Returns the number of known tokens of each sequence, int64 [R].

    A token without a block yet goes to the padding block, and is copied from `last_tokens` when its block is allocated.
    """
    arrays, page_size = state.slots, state.options.limits.page_size
    positions = arrays.num_known_tokens[slots]
    table_indices = positions // page_size
    # Flat indices: NumPy reads and writes with one index array in half the time that it takes with two.
    blocks = arrays.block_tables.reshape(-1).take(slots * arrays.block_tables.shape[1] + table_indices)
    kv_indices = blocks.astype(np.int64)
    kv_indices *= page_size
    kv_indices += positions - table_indices * page_size
    state.blocks.tokens.reshape(-1)[kv_indices] = token_ids
    arrays.last_tokens[slots] = token_ids
    if logprobs is not None:
        if state.blocks.sampled_logprobs is None:
            state.blocks.sampled_logprobs = np.full(state.blocks.tokens.shape, np.nan, np.float32)
        state.blocks.sampled_logprobs.reshape(-1)[kv_indices] = logprobs
        state.slots.last_logprobs[slots] = logprobs
    positions += 1
    arrays.num_known_tokens[slots] = positions
    return positions


def _record_top_logprobs(
    state: EngineState, slots: NDArray[np.int64], is_valid: NDArray[np.bool_], top: TopOfRows
) -> None:
    """Append the top-k logprobs to their sequences.

    slots: [R] slots of all rows. is_valid: [R] False where the row's sequence has left its slot.
    """
    for slot, is_running, token_ids, logprobs in zip(
        slots[top.rows].tolist(), is_valid[top.rows].tolist(), top.token_ids, top.logprobs, strict=True
    ):
        if is_running:
            sequence = state.slots.sequence(slot)
            assert sequence.kept_top is not None, "top-k logprobs for a sequence that did not ask for them"
            sequence.kept_top.append(token_ids, logprobs)


def _note_grammar_tokens(
    state: EngineState, slots: NDArray[np.int64], token_ids: NDArray[np.int32], has_ended: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Pass new tokens to the grammar matchers, except tokens that end their sequence. All arrays are [R].

    Returns bool [R]: the matcher decides whether the sequence ends. This includes a sequence at its token limit,
    because its last token may complete the grammar.
    """
    arrays, grammars = state.slots, state.grammars
    has_grammar = arrays.has_grammar[slots] & ~has_ended
    rows = np.flatnonzero(has_grammar)
    if len(rows):
        assert grammars is not None
        slots = slots[rows]
        wants_mask = arrays.num_known_tokens[slots] <= arrays.max_kv_tokens[slots]
        columns = (slots.tolist(), token_ids[rows].tolist(), wants_mask.tolist())
        for slot, token_id, wants in zip(*columns, strict=True):
            grammars.note(arrays.sequence(slot), token_id, wants)
    return has_grammar


def apply_grammars(state: EngineState) -> None:
    """Apply what the grammar threads have finished. Sequences that end are released and their deltas added."""
    assert state.grammars is not None
    begun, read = state.grammars.take()
    for sequence, error in begun:
        if sequence.phase is Phase.FINISHED:
            continue
        if error:
            abort(state, sequence, error)
        else:
            begin_or_end(state, sequence, is_blocked=True)
    for sequence in read:
        if sequence.phase is not Phase.FINISHED:
            _resume_or_end(state, sequence)


def _resume_or_end(state: EngineState, sequence: Sequence) -> None:
    """Handle a sequence whose grammar matcher has read its newest token."""
    arrays, slot, grammar_matcher = state.slots, sequence.slot, sequence.grammar_matcher
    assert grammar_matcher is not None
    if grammar_matcher.error or grammar_matcher.is_complete:
        end_sequence(state, slot, is_stop=True, error=grammar_matcher.error)
    elif not grammar_matcher.wants_mask:
        end_sequence(state, slot, is_stop=False)
    elif sequence.token_masks is not None and not next_mask(state, sequence).any():
        end_sequence(state, slot, is_stop=True)
    else:
        arrays.awaits_matcher[slot] = False


def begin_or_end(state: EngineState, sequence: Sequence, is_blocked: bool = False) -> None:
    """Queue a sequence whose grammar is compiled, or end it if its token filter allows no token that the grammar does.

    is_blocked: it is among the blocked sequences."""
    if sequence.token_masks is not None and not next_mask(state, sequence).any():
        if not is_blocked:
            state.queues.block(sequence)  # from where it is released
        end_waiting(state, sequence, "stop")
    elif is_blocked:
        state.queues.unblock(sequence)
    else:
        state.queues.add_waiting(sequence)


def _apply_filters(state: EngineState, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Lets the sequences sample again whose token filters depend on their tokens; returns bool [R], where no token is
    left. Those with a grammar still await their matchers. slots: int64 [R]."""
    arrays = state.slots
    leaves_none = np.zeros(len(slots), np.bool_)
    for row in np.flatnonzero(arrays.needs_results[slots] & ~arrays.has_grammar[slots]).tolist():
        slot = int(slots[row])
        sequence = arrays.sequence(slot)
        assert sequence.token_masks is not None
        newest = last_tokens(state, sequence, sequence.token_masks.num_read_tokens)
        leaves_none[row] = sequence.token_masks.leaves_none(newest)
        arrays.awaits_matcher[slot] = False
    return leaves_none


def end_sequence(state: EngineState, slot: int, is_stop: bool, error: str = "") -> None:
    """Finish a sequence whose last token is known, or earlier where a stop string is complete.

    is_stop: finish reason "stop", also at the last allowed token; otherwise "length". error: why it is aborted, or "".
    """
    sequence = state.slots.sequence(slot)
    if sequence.request.max_new_tokens == 0:
        state.totals.generation_tokens -= 1  # it was sampled, but not requested
        _finish(state, sequence, [], "length")
        return
    token_ids = all_tokens(state, sequence)
    reason: FinishReason = "stop" if is_stop else "length"
    if sequence.stop_matcher is not None:
        num_checked = int(state.slots.num_counted_tokens[slot])
        num_tokens = sequence.stop_matcher.first_completion(token_ids, num_checked, sequence.request.min_tokens)
        if num_tokens is not None:
            token_ids, reason, error = token_ids[:num_tokens], "stop", ""
    _finish(state, sequence, token_ids, reason, error)


def abort(state: EngineState, sequence: Sequence, error: str) -> None:
    """Abort a waiting sequence whose grammar is not available. error: why."""
    assert sequence.phase is Phase.WAITING
    _end_with_error(state, sequence, error, "grammar_too_complex")


def end_waiting(state: EngineState, sequence: Sequence, reason: FinishReason) -> None:
    """Finish a waiting sequence with the tokens that it has. If its prompt's logprobs are wanted and not known, it ends
    with an error."""
    assert sequence.phase is Phase.WAITING
    if sequence.needs_prompt_logprobs:
        _end_with_error(state, sequence, "aborted before its prompt was computed", "aborted")
        return
    release(state, sequence)
    if sequence.num_cached_tokens is None:
        sequence.num_cached_tokens = 0
    start = sequence.num_streamed_tokens
    logprobs = sequence.kept_logprobs[start:] if sequence.request.want_logprobs else None
    versions = sequence.weight_versions or state.weight_versions
    delta = _make_delta(sequence, sequence.kept_token_ids[start:], logprobs, reason, versions=versions)
    state.deltas.append(replace(delta, experts=sequence.kept_experts))


def _end_with_error(
    state: EngineState, sequence: Sequence, error: str, error_code: ErrorCode, keep_kv: bool = True
) -> None:
    """Release a sequence in any phase; its last delta has no tokens. keep_kv: as for release."""
    release(state, sequence, keep_kv)
    if sequence.num_cached_tokens is None:
        sequence.num_cached_tokens = 0
    logprobs: list[float] | None = [] if sequence.request.want_logprobs else None
    state.deltas.append(_make_delta(sequence, [], logprobs, "stop", error, error_code))


def _finish(
    state: EngineState, sequence: Sequence, token_ids: list[int], reason: FinishReason, error: str = ""
) -> None:
    """Release a running sequence and add its last delta.

    token_ids: its completion, a prefix of its sampled tokens. error: why its grammar cannot be followed, or "".
    """
    if sequence.stop_matcher is not None:
        state.totals.generation_tokens += len(token_ids) - int(state.slots.num_counted_tokens[sequence.slot])
    logprobs = None
    if sequence.request.want_logprobs:
        logprobs = all_logprobs(state, sequence)[sequence.num_streamed_tokens : len(token_ids)]
    if not error:
        state.totals.finished_sequences += 1
        state.lengths.newest.append((int(state.slots.predicted_tokens[sequence.slot]), len(token_ids)))
        if sequence.may_stop:
            state.lengths.new_ends.append((len(token_ids), reason == "stop"))
    keep_prompt_logprobs(state, sequence)
    experts = experts_of(state, sequence, len(token_ids))
    release(state, sequence)
    error_code: ErrorCode | None = "grammar_too_complex" if error else None
    new_ids = token_ids[sequence.num_streamed_tokens :]
    versions = sequence.weight_versions or state.weight_versions
    delta = _make_delta(sequence, new_ids, logprobs, reason, error, error_code, versions)
    state.deltas.append(delta if experts is None else replace(delta, experts=experts))


def _end_nonfinite(state: EngineState, step: StepInFlight, found: NonfiniteTokens) -> None:
    """End the sequences that use the blocks of these tokens, and remove the blocks from the prefix tree.

    A sequence that uses such a block has the same tokens up to its end, so its own numbers would not be finite either.
    The sequence that computed it may have left since, and its block may have been allocated again.
    """
    arrays, blocks, page_size = state.slots, state.blocks, state.options.limits.page_size
    for position, block in zip(found.positions.tolist(), found.blocks.tolist(), strict=True):
        if blocks.allocated_in[block] > step.step_id:
            continue
        state.totals.nonfinite_rows += 1
        uses_block = arrays.is_running & (arrays.block_tables[:, position // page_size] == block)
        for slot in np.flatnonzero(uses_block).tolist():
            _end_with_error(state, arrays.sequence(slot), NUMERICAL_ERROR, "numerical_error", keep_kv=False)
        blocks.free(blocks.tree.discard(block))


def stream_new_tokens(state: EngineState) -> None:
    """Add deltas for the streamed sequences that have new tokens and are due; note when the next one is due.

    With stop strings, only tokens known not to follow one are sent, because a sent token cannot be withdrawn.
    """
    arrays, now_s = state.slots, time.monotonic()
    slots = np.flatnonzero(arrays.is_streamed)
    num_generated = arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]
    num_final = np.where(arrays.has_stops[slots], arrays.num_counted_tokens[slots], num_generated)
    num_new = num_final - arrays.num_streamed_tokens[slots]
    next_s = arrays.streamed_s[slots] + STREAM_SECONDS
    is_due = (num_new > 0) & (next_s <= now_s)
    state.stream_due_s = float(next_s[(num_new > 0) & ~is_due].min(initial=math.inf))
    slots, num_generated, num_final, num_new = (column[is_due] for column in (slots, num_generated, num_final, num_new))
    # Nearly always the blocks have all the new tokens: read those of all sequences together.
    is_last = num_final == num_generated
    token_ids = _read(state, slots, num_new, num_final, is_last, state.blocks.tokens, arrays.last_tokens)
    logprobs: list[float] | None = None
    if state.blocks.sampled_logprobs is not None:
        by_block = state.blocks.sampled_logprobs
        logprobs = _read(state, slots, num_new, num_final, is_last, by_block, arrays.last_logprobs)
    ends = np.cumsum(num_new)
    columns = (slots, num_final, ends - num_new, ends)
    for slot, final, start, end in zip(*(column.tolist() for column in columns), strict=True):
        sequence = state.slots.sequence(slot)
        keep_prompt_logprobs(state, sequence)
        num_sent, want_logprobs = sequence.num_streamed_tokens, sequence.request.want_logprobs
        new_logprobs: list[float] | None = None
        if num_sent >= len(sequence.kept_token_ids):
            new_ids = token_ids[start:end]
            if want_logprobs:
                assert logprobs is not None
                new_logprobs = logprobs[start:end]
        else:  # tokens kept over a preemption are not where the slot's own tokens are
            new_ids = all_tokens(state, sequence)[num_sent:final]
            if want_logprobs:
                new_logprobs = all_logprobs(state, sequence)[num_sent:final]
        state.deltas.append(_make_delta(sequence, new_ids, new_logprobs, None))
        sequence.num_streamed_tokens = final
    arrays.num_streamed_tokens[slots] = num_final
    arrays.streamed_s[slots] = now_s


def _read(
    state: EngineState,
    slots: NDArray[np.int64],
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    is_last: NDArray[np.bool_],
    by_block: NDArray[Any],
    newest: NDArray[Any],
) -> list[Any]:
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
    found: list[Any] = values.tolist()
    return found


def _make_delta(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[float] | None,
    reason: FinishReason | None,
    error: str = "",
    error_code: ErrorCode | None = None,
    versions: WeightVersions = FIRST_VERSIONS,
) -> SequenceDelta:
    """Delta with the next tokens of a sequence, after the tokens that are in deltas already."""
    assert sequence.num_cached_tokens is not None
    start = sequence.num_streamed_tokens
    prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    times = None
    if reason is not None:
        num_tokens = start + len(token_ids)
        times = SequenceTimes(sequence.admitted_s, sequence.first_token_s, time.monotonic(), num_tokens)
    return SequenceDelta(
        request_id=sequence.request.request_id,
        sequence_index=sequence.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.counts.computed,
        num_recomputed_tokens=sequence.counts.recomputed,
        num_shared_tokens=sequence.counts.shared,
        top=None if sequence.kept_top is None else sequence.kept_top.part(start, start + len(token_ids)),
        prompt_logprobs=prompt_logprobs,
        error=error,
        error_code=error_code,
        weight_versions=versions,
        times=times,
        vector=sequence.vector,
    )
