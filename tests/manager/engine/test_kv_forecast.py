"""The simulated future of the running sequences against the engine itself, step by step until all have ended."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.engine_driver import Bench, Shape, make_options, make_requests
from tests.manager.helpers.kv_usage_replay import replay_usage
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.state.sequence import Phase

STEP_SECONDS = 0.001
"""So short that as many steps are sent ahead as may be."""

shapes_strategy = st.lists(
    st.builds(
        Shape,
        prefix=st.integers(-2, 1),
        num_shared=st.integers(0, 24),
        num_fresh=st.integers(0, 8),
        num_sequences=st.integers(1, 3),
        max_new_tokens=st.integers(1, 20),
        cache_salt=st.sampled_from(["", "", "", "x"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300)
@given(
    shapes=shapes_strategy,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([3, 4]),
    max_tokens=st.integers(1, 40),
    max_seqs=st.integers(1, 12),
    max_steps_ahead=st.sampled_from([1, 2, 3, 8]),
    prefill_multiple=st.sampled_from([None, None, 1, 4]),
)
def test_the_curve_is_what_a_replay_uses(
    shapes, seed, page_size, max_tokens, max_seqs, max_steps_ahead, prefill_multiple
):
    options = make_options(
        40,
        page_size,
        max_tokens_per_forward=max_tokens,
        max_seqs_per_forward=max_seqs,
        max_steps_ahead=max_steps_ahead,
        prefill_multiple=prefill_multiple,
    )
    rng = random.Random(seed)
    bench = Bench(options, (STEP_SECONDS,), rng=rng)
    bench.state.step_seconds = STEP_SECONDS
    requests = make_requests(shapes, options.limits)
    while requests or bench.queue:
        messages = [requests.pop(0) for _ in range(rng.randint(0, 2)) if requests]
        bench.turn(messages, rng.randint(0, 2))
        if rng.random() < 0.9:
            continue
        usage = replay_usage(bench.state)
        num_hold = max_steps_ahead - 1
        curve = forecast_kv(bench.state, bench.state.prefill_rate).curve.at(np.arange(len(usage) + num_hold)).tolist()
        assert curve[num_hold + 1 :] == [*usage, *[0] * num_hold][num_hold + 1 :]
        assert max(usage) <= options.limits.num_kv_blocks
        if any(sequence.phase is Phase.DRAINING for sequence in bench.running()):
            # Which of the steps that are sent was the last of a sequence is not known: as late as it may be.
            assert all(simulated >= used for simulated, used in zip(curve, usage, strict=False))
        else:
            assert curve == [*usage, *[0] * num_hold]
    bench.assert_nothing_is_left()
