"""Forecast the lengths of the running sequences, their KV blocks step by step until the last of them ends, and how many
prompt tokens those steps compute."""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.microbatches import prefill_per_round
from tokasaurus.manager.planning.kv_simulation import (
    SequenceLoads,
    UsageCurve,
    find_shared_blocks,
    join_loads,
    simulate_kv,
    window_loads,
)
from tokasaurus.manager.planning.length_predictor import fit_forecast
from tokasaurus.manager.planning.prefill_forecast import PrefillForecast, count_decoding, forecast_prefill
from tokasaurus.manager.planning.step_budget import MIN_CHUNK, PrefillTime, num_steps_to_keep_in_flight, prefill_rate
from tokasaurus.manager.planning.step_times import decode_features
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.generation import SequenceProgress
from tokasaurus.messages.status import WindowGroups

Int64Array = NDArray[np.int64]

_NO_TOKENS = np.zeros(0, np.int64)

MIN_SHARE_NEW = 1 / 64
"""A new forecast is made once this fraction of the completions it would use is new."""


@dataclass(frozen=True, slots=True)
class KVForecast:
    """Current result of the KV simulation for the running sequences."""

    curve: UsageCurve
    """Blocks in use in every future step."""
    prefill: PrefillForecast
    """The step in which each prompt in prefill is done; new prompts are served after these."""
    node_last_steps: Int64Array
    """By prefix tree node: the last step in which a sequence uses it; -1 if none does."""
    release_delay: int
    """Steps from a sequence's last step until its blocks are freed."""


def note_ends(state: EngineState) -> None:
    """Record the lengths of the sequences that just finished."""
    if state.lengths.new_ends and state.lengths.recorded is not None:
        num_tokens, stopped = zip(*state.lengths.new_ends, strict=True)
        state.lengths.recorded.record(np.array(num_tokens, np.int64), np.array(stopped, np.bool_), _round(state))
    state.lengths.new_ends.clear()


def forecast_is_old(state: EngineState) -> bool:
    """Whether enough completions have ended since the last forecast to make a new one."""
    config, lengths = state.options.config, state.lengths.recorded
    if lengths is None or lengths.num_recorded < config.early_stopping_initial_wait:
        return False
    num_new = lengths.num_recorded - state.lengths.num_in_forecast
    return num_new >= max(1, min(lengths.num_recorded, config.early_stopping_buffer_size) * MIN_SHARE_NEW)


def update_forecast(state: EngineState) -> None:
    """Make a new forecast from recently ended completions and the running sequences."""
    config, lengths, arrays = state.options.config, state.lengths.recorded, state.slots
    assert lengths is not None
    slots = np.flatnonzero(arrays.is_running & arrays.may_stop)
    state.lengths.forecast = fit_forecast(
        lengths,
        running=arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots],
        step=_round(state),
        num_prediction_buckets=config.early_stopping_num_prediction_buckets,
        std_buffer_scale=config.spec_allocation_std_buffer_scale,
    )
    state.lengths.num_in_forecast = lengths.num_recorded


def running_progress(state: EngineState) -> list[SequenceProgress]:
    """How far each running sequence of a job is, and what the current forecast expects of it."""
    arrays = state.slots
    running = (arrays.sequence(slot) for slot in np.flatnonzero(arrays.is_running).tolist())
    sequences = [sequence for sequence in running if sequence.request.job]
    slots = np.array([sequence.slot for sequence in sequences], np.int64)
    num_tokens = arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]
    max_new_tokens = arrays.max_kv_tokens[slots] - arrays.num_prompt_tokens[slots] + 1
    expected: list[int | None] = max_new_tokens.tolist()
    if state.lengths.forecast is not None:
        forecast = state.lengths.forecast.expected(num_tokens, max_new_tokens, arrays.admitted_at[slots])
        expected = np.where(arrays.may_stop[slots], forecast, max_new_tokens).tolist()
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


def expected_decode_steps(state: EngineState, slots: Int64Array) -> Int64Array:
    """Expected decode steps of the running sequences `slots` after the steps sent and after their prefill, [N]."""
    arrays = state.slots
    num_kv_tokens = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    max_kv_tokens = arrays.max_kv_tokens[slots]
    num_prompt_tokens = arrays.num_prompt_tokens[slots]
    num_steps = max_kv_tokens - num_kv_tokens
    forecast = state.lengths.forecast
    if forecast is None:
        return num_steps
    # Once the KV of g sampled tokens is computed, one more is sampled: the sequence is longer than g tokens.
    num_past = num_kv_tokens - num_prompt_tokens
    expected = forecast.expected(num_past, max_kv_tokens - num_prompt_tokens + 1, arrays.admitted_at[slots])
    return np.where(arrays.may_stop[slots], expected - num_past - 1, num_steps)


def running_slots(state: EngineState) -> tuple[Int64Array, Int64Array]:
    """Slots of the sequences past their prefill, in any order, and slots in prefill, in prefill order."""
    prefilling = np.array([sequence.slot for sequence in state.queues.prefilling], np.int64)
    is_past = state.slots.is_running.copy()
    is_past[prefilling] = False
    return np.flatnonzero(is_past), prefilling


def wanted_prefill_rate(state: EngineState, num_tokens: Int64Array, num_steps: Int64Array) -> int | None:
    """Most prefill tokens per step for the running sequences and K others; None if prefill is greedy.

    num_tokens, num_steps: [K] prefill tokens and decode steps of the others. Precondition: there is a sequence.
    """
    config, arrays = state.options.config, state.slots
    if config.greedy_prefill:
        return None
    slots = np.flatnonzero(arrays.is_running)
    num_past_steps = np.maximum(0, arrays.num_kv_tokens[slots] - arrays.num_prefill_tokens[slots])
    return prefill_rate(
        np.concatenate((arrays.num_prefill_tokens[slots] - arrays.first_positions[slots], num_tokens)),
        np.concatenate((num_past_steps + expected_decode_steps(state, slots), num_steps)),
        config.prefill_round_up_multiple,
    )


def prefill_time(state: EngineState, decoding: NDArray[np.int64]) -> PrefillTime:
    """How long the prompts of the next step may take, by the times of earlier steps. decoding: slots that decode in it.

    With several microbatches, each has an equal share of the time: the last stage sees a step of each of them before it
    sees the same one again. Until a step has had prompts, each token is expected to take as long as in the warm-up.
    While nothing decodes, no stream waits for a token.
    """
    options, model = state.options, state.step_time_model
    is_streaming = state.slots.num_streamed > 0 and len(state.queues.decoding()) > 0
    if options.step_limit.prefill_seconds(0.0, is_streaming) == inf:
        return PrefillTime(inf, 0.0, 0.0)
    decode_seconds = model.predict(decode_features(state.slots.num_kv_tokens[decoding] + 1))
    share = options.num_microbatches
    seconds = options.step_limit.prefill_seconds(share * decode_seconds, is_streaming) / share
    per_token, per_pair = model.prefill_weights
    if not per_token:
        per_token, per_pair = options.limits.seconds_per_token, model.first_per_pair
    return PrefillTime(seconds, per_token, per_pair, max(MIN_CHUNK, model.max_prefill))


def timed_prefill_rate(
    state: EngineState, decoding: Int64Array, prefilling: Int64Array, new_starts: Int64Array, new_left: Int64Array
) -> int | None:
    """Prompt tokens that fit into the time of a step, in the mean over all prompts; None if time does not limit them.

    decoding, prefilling: slots. new_starts, new_left: as for forecast_kv. With several microbatches, for a round.
    """
    arrays, num_microbatches = state.slots, state.options.num_microbatches
    starts = arrays.num_kv_tokens[prefilling]
    num_left = np.concatenate((arrays.num_prefill_tokens[prefilling] - starts, new_left))
    if not len(num_left):
        return None
    time = prefill_time(state, decoding[::num_microbatches])
    rate = time.usual_rate(np.concatenate((starts, new_starts)), num_left)
    return None if rate == inf else max(MIN_CHUNK, int(rate * num_microbatches))


def forecast_kv(
    state: EngineState,
    prefill_rate: int | None,
    new_starts: Int64Array = _NO_TOKENS,
    new_left: Int64Array = _NO_TOKENS,
) -> KVForecast:
    """Simulate the running sequences to their expected ends, with at most `prefill_rate` prefill tokens per step.

    With several microbatches, a step of the forecast is a round: one step of each of them. new_starts, new_left: [K]
    cached tokens and tokens to compute of prompts that may be admitted: they change how many tokens fit into a step.
    """
    arrays, page_size = state.slots, state.options.limits.page_size
    max_ahead = state.options.config.scheduling_steps_ahead
    if state.step_seconds is not None:
        wanted = num_steps_to_keep_in_flight(state.step_seconds, max_ahead)
        max_ahead = max(wanted, len(state.steps_in_flight))
    num_microbatches = state.options.num_microbatches
    past, prefilling = running_slots(state)
    rates = (
        prefill_rate,
        prefill_per_round(state, new_left),
        timed_prefill_rate(state, past[arrays.is_decoding[past]], prefilling, new_starts, new_left),
    )
    prefill_rate = min((rate for rate in rates if rate is not None), default=None)
    release_delay = 1 if num_microbatches > 1 else max_ahead - 1
    slots = np.concatenate((past, prefilling))
    num_steps = expected_decode_steps(state, slots)
    num_tokens = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    num_past = len(past)
    start_steps = np.zeros(len(slots), np.int64)
    counts = count_decoding(SequenceLoads(num_tokens[:num_past], start_steps[:num_past], num_steps[:num_past]))
    num_left = arrays.num_prefill_tokens[prefilling] - arrays.num_kv_tokens[prefilling]
    max_tokens = state.options.config.max_tokens_per_forward * num_microbatches
    prefill = forecast_prefill(num_left, num_steps[num_past:], counts, max_tokens, prefill_rate)
    start_steps[num_past:] = prefill.start_steps
    shared = find_shared_blocks(arrays.nodes[slots], start_steps + num_steps + release_delay, state.blocks.tree.arrays)
    own_tokens = num_tokens - shared.num_shared_blocks * page_size
    loads, shared_loads = SequenceLoads(own_tokens, start_steps, num_steps), shared.loads
    if (windows := state.blocks.windows) is not None:
        num_shared, held = shared.num_shared_blocks, arrays.first_held[slots]
        first_own = np.maximum(held, num_shared)
        kept = np.maximum(0, num_tokens - first_own * page_size)
        own = window_loads(windows.groups, page_size, kept, start_steps, num_steps)
        loads = join_loads(loads, own)
        # Sets of several sequences, until the last of them sees none any more.
        num_computed = arrays.num_kv_tokens[slots]
        num_own = np.maximum(0, -(-num_computed // page_size) - first_own).sum()
        sharing = np.flatnonzero(held < num_shared)
        steps_left = num_shared[sharing] * page_size + abs(windows.groups.window) + page_size - num_tokens[sharing]
        last_steps = start_steps[sharing] + np.clip(steps_left, 0, num_steps[sharing]) + release_delay
        num_in_common = windows.groups.num_groups * max(0, windows.num_held - int(num_own))
        shared_loads = shared_loads.and_blocks(num_in_common, int(last_steps.max(initial=release_delay)))
        # Prompts in prefill need more for the tokens of a step.
        passing = passing_blocks(windows.groups, page_size, kept[num_past:], max_tokens)
        shared_loads = shared_loads.and_blocks(passing, int(prefill.start_steps.max(initial=0)))
    curve = simulate_kv(loads, shared_loads, page_size, release_delay)
    return KVForecast(curve, prefill, shared.last_steps, release_delay)


def passing_blocks(windows: WindowGroups, page_size: int, num_kept: Int64Array, max_tokens: int) -> int:
    """Blocks that layers with windows need for prompts besides, while a step computes their tokens. num_kept: [K]
    tokens that they would keep of each prompt. max_tokens: of all in a step."""
    beyond = np.maximum(0, num_kept - windows.num_held(page_size) * page_size)
    num_tokens = min(int(beyond.sum()), max_tokens)
    return windows.num_groups * (-(-num_tokens // page_size) + bool(num_tokens))
