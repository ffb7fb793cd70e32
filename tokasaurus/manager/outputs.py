"""Results come back: tokens are appended, and it is decided which sequences end."""

from tokasaurus.manager.scheduler import average_step_seconds
from tokasaurus.manager.sequence import Phase, Sequence
from tokasaurus.manager.state import EngineState
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.messages.generation import FinishReason, SequenceDelta


def apply_output(state: EngineState, output: ForwardOutput) -> list[SequenceDelta]:
    """The results of the oldest step in flight: gives the deltas of the sequences that they end.

    A sequence that had ended before (the step was sent ahead of the result that ended it) loses its token here; it is
    not counted anywhere.
    """
    step = state.steps_in_flight.popleft()
    assert step.step_id == output.step_id, f"result of step {output.step_id}, expected {step.step_id}"
    assert len(step.sampled) == len(output.token_ids), f"step {step.step_id}: {len(output.token_ids)} tokens"
    state.step_seconds = average_step_seconds(state.step_seconds, output.forward_seconds)
    state.step_totals.num_steps += 1
    state.step_totals.num_rows += step.num_rows
    state.step_totals.num_prefill_tokens += step.num_prefill_tokens
    state.step_totals.busy_seconds += output.forward_seconds
    logprobs = None if output.logprobs is None else output.logprobs.tolist()
    deltas: list[SequenceDelta] = []
    for row, (sequence, token_id) in enumerate(zip(step.sampled, output.token_ids.tolist(), strict=True)):
        if sequence.phase is Phase.FINISHED:
            continue
        state.total_generation_tokens += 1
        sequence.token_ids.append(token_id)
        if sequence.logprobs is not None:
            assert logprobs is not None, f"step {step.step_id} has no log-probabilities"
            sequence.logprobs.append(logprobs[row])
        finish_reason = find_finish(sequence, token_id)
        if finish_reason is not None:
            state.release(sequence)
            deltas.append(final_delta(sequence, finish_reason))
    return deltas


def find_finish(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Whether `token_id`, just appended, ends the sequence. A stop at the last allowed token is a stop."""
    if token_id in sequence.eos_ids:
        return "stop"
    if sequence.stop_matcher is not None and sequence.stop_matcher.just_completed(sequence.token_ids):
        return "stop"
    if len(sequence.token_ids) == sequence.request.max_new_tokens:
        return "length"
    return None


def final_delta(sequence: Sequence, finish_reason: FinishReason) -> SequenceDelta:
    """All tokens of a finished sequence: nothing is streamed yet, and no prompt is cached yet."""
    return SequenceDelta(
        request_id=sequence.request.request_id,
        sequence_index=sequence.index,
        token_ids=sequence.token_ids,
        logprobs=sequence.logprobs,
        finish_reason=finish_reason,
        num_cached_tokens=0,
    )
