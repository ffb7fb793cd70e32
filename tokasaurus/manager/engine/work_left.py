"""How long the work of an engine still takes, by the expected lengths of completions, and how long the oldest of it has
waited."""

from itertools import islice

import numpy as np

from tokasaurus.manager.engine.kv_forecast import expected_decode_steps
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.status import StepCost, TimeLeft
from tokasaurus.monitoring.time_left import Done, Work, time_left

MAX_LOOKED_AT = 64
"""Waiting sequences that stand for all."""
_MAX_REQUESTS = 4096
"""Unfinished requests that are looked at for one that belongs to no job."""
_ERROR = 0.3
"""Relative error of the expected lengths, which do not tell how sure they are."""


def oldest_wait(state: EngineState, now_s: float) -> float | None:
    """Age of the oldest request with a waiting sequence; None if none waits. now_s: now, by time.monotonic."""
    if not state.queues.num_waiting:
        return None
    oldest_s = next((samples.added_s for samples in state.unfinished.values() if samples.is_waiting), None)
    return None if oldest_s is None else max(0.0, now_s - oldest_s)


def left_and_oldest_wait(state: EngineState, now_s: float) -> tuple[TimeLeft | None, float | None]:
    return engine_time_left(state), oldest_wait(state, now_s)


def step_cost(state: EngineState) -> StepCost | None:
    """What a round of the running sequences takes: one step of each microbatch. None before the first result."""
    arrays, (per_step, per_row, per_kv, *_) = state.slots, state.step_time_model.weights.tolist()
    if not per_step:
        return None
    slots = np.flatnonzero(arrays.is_running)
    counts = (arrays.num_kv_tokens, arrays.num_prompt_tokens)
    num_kv, num_prompt = (float(tokens[slots].mean()) if len(slots) else 0.0 for tokens in counts)
    per_token, per_pair = state.step_time_model.prefill_weights
    return StepCost(
        per_step * state.options.num_microbatches,
        per_row + per_kv * num_kv,
        (per_token or state.options.limits.seconds_per_token) + per_pair * num_prompt,
    )


def round_seconds(state: EngineState) -> float | None:
    """Expected time of a decode step of each microbatch; None before the first result."""
    cost = step_cost(state)
    slowness = None if cost is None else state.pace.slowness(cost)
    if cost is None or slowness is None:
        return None if state.step_seconds is None else state.step_seconds * state.options.num_microbatches
    return slowness * (cost.per_step + cost.per_row * len(state.queues.decoding()))


def note_pace(state: EngineState, now_s: float) -> None:
    """Call it about once a second. now_s: now, by time.monotonic."""
    if not state.slots.num_running and not state.queues.num_waiting:
        state.pace.clear()
        return
    totals, num_rounds = state.step_totals, state.step_totals.num_steps / state.options.num_microbatches
    state.pace.note(Done(now_s, state.totals.generation_tokens, num_rounds, totals.num_prefill_tokens))


def engine_time_left(state: EngineState) -> TimeLeft | None:
    """Until all that runs and waits will have ended, and all lines of the server's jobs; None if it is not known."""
    requests = (samples.request for samples in islice(state.unfinished.values(), _MAX_REQUESTS))
    if state.jobs_left is not None and all(request.job for request in requests):
        return state.jobs_left
    cost, work = step_cost(state), work_left(state)
    left = None if cost is None or work is None else time_left(work, state.pace, cost)
    if left is None or state.jobs_left is None:
        return left
    return TimeLeft(*map(max, left, state.jobs_left))


def work_left(state: EngineState) -> Work | None:
    """What the running and waiting sequences are expected to need; None if there are none."""
    arrays, num_waiting = state.slots, state.queues.num_waiting
    slots = np.flatnonzero(arrays.is_running & ~arrays.is_ending)
    if not len(slots) and not num_waiting:
        return None
    num_prompt = arrays.num_prompt_tokens[slots]
    num_kv = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    expected = num_kv + np.maximum(0, expected_decode_steps(state, slots)) - num_prompt + 1
    num_left = np.maximum(0, expected - (np.maximum(arrays.num_known_tokens[slots], num_prompt) - num_prompt))
    to_compute = float(np.maximum(0, arrays.num_prefill_tokens[slots] - arrays.num_kv_tokens[slots]).sum())
    waiting: list[float] = []
    if num_waiting:
        first = state.queues.first_waiting(MAX_LOOKED_AT)
        most = np.array([sequence.request.max_new_tokens for sequence in first], np.int64)
        may_stop = np.array([sequence.may_stop for sequence in first], np.bool_)
        lengths = most
        if state.lengths.forecast is not None:
            forecast = state.lengths.forecast.expected(np.zeros_like(most), most, np.arange(len(most)))
            lengths = np.where(may_stop, forecast, most)
        waiting = lengths.astype(np.float64).tolist()
        tokens = state.totals.tokens
        share = tokens.computed / tokens.asked if tokens.asked else 1.0
        mean_prompt = sum(len(sequence.request.prompt_ids) for sequence in first) / max(1, len(first))
        to_compute += share * mean_prompt * num_waiting
    return Work(num_left.tolist(), num_waiting, waiting, len(slots), to_compute, _ERROR)
