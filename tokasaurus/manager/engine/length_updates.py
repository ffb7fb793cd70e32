"""Keep the length predictor's forecast up to date, and tell what it expects of background sequences."""

import numpy as np

from tokasaurus.manager.planning.length_predictor import fit_forecast
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.generation import SequenceProgress

MIN_SHARE_NEW = 1 / 64
"""A new forecast is made once this fraction of the completions it would use is new."""


def note_ends(state: EngineState) -> None:
    """Record the lengths of the completions that the newest results ended."""
    if state.ended and state.lengths is not None:
        num_tokens, stopped = zip(*state.ended, strict=True)
        state.lengths.record(np.array(num_tokens, np.int64), np.array(stopped, np.bool_), _round(state))
    state.ended.clear()


def forecast_is_old(state: EngineState) -> bool:
    """Whether enough completions have ended since the last forecast to make a new one."""
    early, lengths = state.options.early_stopping, state.lengths
    if early is None or lengths is None or lengths.num_recorded < early.initial_wait:
        return False
    num_new = lengths.num_recorded - state.num_ends_in_forecast
    return num_new >= max(1, min(lengths.num_recorded, early.buffer_size) * MIN_SHARE_NEW)


def update_forecast(state: EngineState) -> None:
    """Make a new forecast from recently ended completions and the running sequences."""
    early, lengths, arrays = state.options.early_stopping, state.lengths, state.slots
    assert early is not None
    assert lengths is not None
    slots = np.flatnonzero(arrays.is_running & arrays.may_stop)
    state.forecast = fit_forecast(
        lengths,
        running=arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots],
        step=_round(state),
        num_buckets=early.num_prediction_buckets,
        std_buffer_scale=early.std_buffer_scale,
    )
    state.num_ends_in_forecast = lengths.num_recorded


def background_progress(state: EngineState) -> list[SequenceProgress]:
    """How far each running background sequence is, and what the current forecast expects of it."""
    arrays = state.slots
    sequences = [
        sequence
        for sequence in (state.sequences[slot] for slot in np.flatnonzero(arrays.is_running).tolist())
        if sequence is not None and sequence.request.is_background
    ]
    slots = np.array([sequence.slot for sequence in sequences], np.int64)
    num_tokens = arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]
    most = arrays.max_kv_tokens[slots] - arrays.num_prompt_tokens[slots] + 1
    expected: list[int | None] = most.tolist()
    if state.forecast is not None:
        forecast = state.forecast.expected(num_tokens, most, arrays.admitted_at[slots])
        expected = np.where(arrays.may_stop[slots], forecast, most).tolist()
    else:
        may_stop = arrays.may_stop[slots].tolist()
        expected = [None if stops else number for stops, number in zip(may_stop, expected, strict=True)]
    return [
        SequenceProgress(sequence.request.request_id, sequence.index, number, at_end)
        for sequence, number, at_end in zip(sequences, num_tokens.tolist(), expected, strict=True)
    ]


def _round(state: EngineState) -> int:
    """The newest step whose results have arrived; with several microbatches, the number of rounds until then, if none
    was skipped. A sequence samples about one token in each."""
    return max(0, state.last_result_id) // state.options.num_microbatches
