"""How much work is left, by the expected lengths of completions, and how long the oldest of it has waited."""

import numpy as np

from tokasaurus.manager.engine.kv_forecast import expected_decode_steps
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.monitoring.step_stats import WorkLeft


def work_left(state: EngineState, now_s: float) -> WorkLeft:
    """What the running and waiting sequences are expected to need. now_s: now, by time.monotonic.

    A waiting sequence is expected to become as long as the running ones do in the mean. So nothing is expected while
    none runs.
    """
    arrays = state.slots
    slots = np.flatnonzero(arrays.is_running & ~arrays.is_ending)
    oldest_s = None
    if state.queues.num_waiting:
        oldest_s = next((samples.added_s for samples in state.unfinished.values() if samples.is_waiting), None)
    oldest_wait_s = None if oldest_s is None else max(0.0, now_s - oldest_s)
    if not len(slots):
        return WorkLeft(None, 0, oldest_wait_s)
    num_steps = np.maximum(0, expected_decode_steps(state, slots))
    num_prompt = arrays.num_prompt_tokens[slots]
    num_kv = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    expected = num_kv + num_steps - num_prompt + 1
    num_left = np.maximum(0, expected - (np.maximum(arrays.num_known_tokens[slots], num_prompt) - num_prompt))
    num_tokens = float(num_left.sum()) + float(expected.mean()) * state.queues.num_waiting
    return WorkLeft(num_tokens, int(num_left.max()) * state.options.num_microbatches, oldest_wait_s)
