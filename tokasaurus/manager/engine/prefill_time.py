"""How long the prompts of the next step may take, by the times of the steps before."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.step_budget import MIN_CHUNK, PrefillTime
from tokasaurus.manager.planning.step_times import decode_features
from tokasaurus.manager.state.engine_state import EngineState


def prefill_time(state: EngineState, decoding: NDArray[np.int64]) -> PrefillTime:
    """For a step in which the slots `decoding` decode one token each.

    With several microbatches, each has an equal share of the time: the last stage sees a step of each of them before it
    sees the same one again. Until a step has had prompts, each token is expected to take as long as in the warm-up.
    While nothing decodes, no stream waits for a token.
    """
    options, model = state.options, state.step_time_model
    is_streaming = state.num_streamed > 0 and len(state.queues.decoding()) > 0
    if options.step_limit.prefill_seconds(0.0, is_streaming) == inf:
        return PrefillTime(inf, 0.0, 0.0)
    decode_seconds = model.predict(decode_features(state.slots.num_kv_tokens[decoding] + 1))
    share = options.num_microbatches
    seconds = options.step_limit.prefill_seconds(share * decode_seconds, is_streaming) / share
    per_token, per_pair = model.prefill_weights
    if not per_token:
        per_token, per_pair = options.limits.seconds_per_token, model.first_per_pair
    return PrefillTime(seconds, per_token, per_pair, max(MIN_CHUNK, model.most_prefill))
