"""Tests the KV forecast of the running sequences against the engine itself, run step by step until all have ended."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.engine_driver import make_options, make_quick_driver
from tests.manager.helpers.kv_usage_replay import replay_usage
from tests.manager.helpers.requests import make_requests
from tests.manager.helpers.strategies import CACHE_SALTS, random_shape
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.state.sequence import Phase

shapes_strategy = st.lists(
    random_shape(cache_salt=st.sampled_from(CACHE_SALTS)),
    min_size=1,
    max_size=8,
)


PREFILL_FLAGS = ({}, *({"greedy_prefill": False, "prefill_round_up_multiple": multiple} for multiple in (1, 4)))


@examples(300, 8)
@given(
    shapes=shapes_strategy,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([3, 4]),
    max_tokens=st.integers(1, 40),
    max_seqs=st.integers(1, 12),
    scheduling_steps_ahead=st.sampled_from([1, 2, 3, 8]),
    prefill_flags=st.sampled_from(PREFILL_FLAGS),
)
def test_the_forecast_curve_equals_a_replay_of_every_step(
    shapes, seed, page_size, max_tokens, max_seqs, scheduling_steps_ahead, prefill_flags
):
    options = make_options(
        40,
        page_size,
        max_tokens_per_forward=max_tokens,
        max_seqs_per_forward=max_seqs,
        scheduling_steps_ahead=scheduling_steps_ahead,
        **prefill_flags,
    )
    driver = make_quick_driver(options, seed)
    rng = driver.rng
    requests = make_requests(shapes, options.limits)
    while requests or driver.queue:
        messages = [requests.pop(0) for _ in range(rng.randint(0, 2)) if requests]
        driver.step(messages, rng.randint(0, 2))
        if rng.random() < 0.9:
            continue
        usage = replay_usage(driver.state)
        num_steps_until_freed = scheduling_steps_ahead - 1
        curve = (
            forecast_kv(driver.state, driver.state.admission.prefill_rate)
            .curve.at(np.arange(len(usage) + num_steps_until_freed))
            .tolist()
        )
        assert curve[num_steps_until_freed + 1 :] == [*usage, *[0] * num_steps_until_freed][num_steps_until_freed + 1 :]
        assert max(usage) <= options.limits.num_kv_blocks
        if any(sequence.phase is Phase.DRAINING for sequence in driver.running()):
            # The forecast does not know in which step in flight a sequence ended, and assumes the latest possible.
            assert all(simulated >= used for simulated, used in zip(curve, usage, strict=False))
        else:
            assert curve == [*usage, *[0] * num_steps_until_freed]
    driver.assert_nothing_is_left()
