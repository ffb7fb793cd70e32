"""Keep the length predictor's forecast up to date."""

import numpy as np

from tokasaurus.manager.planning.length_predictor import fit_forecast
from tokasaurus.manager.state.engine_state import EngineState

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


def _round(state: EngineState) -> int:
    """The newest step whose results have arrived; with several microbatches, the number of rounds until then, if none
    was skipped. A sequence samples about one token in each."""
    return max(0, state.last_result_id) // state.options.num_microbatches
