"""Hypothesis strategies for random requests and engine options, shared by the engine's tests."""

from typing import Any

from hypothesis import strategies as st

from tests.manager.helpers.engine_driver import NEVER_LEARNS, make_options
from tests.manager.helpers.fake_grammars import VOCAB_SIZE
from tests.manager.helpers.requests import Shape
from tests.manager.helpers.simulation import decode_text
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions
from tokasaurus.messages.status import WindowGroups
from tokasaurus.text.stop_strings import StopTokens

STOP_TOKENS = StopTokens([decode_text([token_id]) for token_id in range(VOCAB_SIZE)])
STOP_STRINGS = [(), (), ("ab",), ("éa", "cc"), ("abc", "bcab", "é"), ("abababab", "b")]
CACHE_SALTS = ["", "", "", "x"]
WINDOWS = [WindowGroups(1, 4), WindowGroups(2, 1), WindowGroups(1, 9), WindowGroups(5, 6), WindowGroups(2, -6)]
ADAPTERS = ["", "", "a0", "a1", "a2", "a3"]
"""Digests; of more adapters than have a number at a time."""


def random_shape(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Shape]:
    """Random shapes. fields: strategies that replace the defaults below or Shape's own defaults."""
    defaults = {
        "prefix": st.integers(-2, 1),
        "num_shared": st.integers(0, 24),
        "num_fresh": st.integers(0, 8),
        "num_sequences": st.integers(1, 4),
        "max_new_tokens": st.integers(1, 24),
    }
    return st.builds(Shape, **(defaults | fields))


varied_fields = {
    "prefix": st.integers(-3, 2),
    "want_logprobs": st.booleans(),
    "cache_salt": st.sampled_from(["", "", "x"]),
    "stop_token_ids": st.sampled_from([(), (), (3,), (9, 2, 5)]),
    "min_tokens": st.sampled_from([0, 0, 1, 6, 30]),
    "prompt_top": st.sampled_from([None, None, None, 0, 2, 5]),
    "adapter": st.one_of(st.just(""), st.sampled_from(ADAPTERS)),
}
varied_options = {
    "scheduling_steps_ahead": st.sampled_from([1, 2, 3, 8]),
    "greedy_prefill": st.booleans(),
    "prefill_round_up_multiple": st.sampled_from([1, 4]),
    "enable_precise_onboard": st.sampled_from([True, True, True, False]),
    "precise_onboard_batch_size": st.sampled_from([1, 2, 128]),
    "deferred_tasks": st.sampled_from([None, "always", "deferred"]),
    "stop_tokens": st.sampled_from([None, STOP_TOKENS]),
    "hydragen": st.sampled_from([None, HydragenOptions(2, 1), HydragenOptions(3, 2)]),
    "num_microbatches": st.sampled_from([1, 1, 2, 5]),
    "max_loras": st.sampled_from([1, 2, 3]),
    "windows": st.sampled_from([None, None, None, *WINDOWS]),
    "num_snapshots": st.sampled_from([0, 0, 0, 1, 2, 5, 30]),
}

shapes_strategy = st.lists(
    random_shape(
        num_shared=st.integers(0, 40),
        num_fresh=st.integers(0, 12),
        stop_strings=st.sampled_from(STOP_STRINGS),
        ignore_eos=st.booleans(),
        **varied_fields,
    ),
    min_size=1,
    max_size=10,
)

PREDICTIONS: tuple[dict[str, Any], ...] = (
    {},
    NEVER_LEARNS,
    {"use_spec_allocation": True, "early_stopping_initial_wait": 2},
)


def make_predicting_options(prediction: dict[str, Any], **changed: Any) -> EngineOptions:
    """prediction: flags of the length predictor."""
    if changed.get("windows") is not None:
        changed["num_snapshots"] = 0
    return make_options(**prediction, **changed)


options_strategy = st.builds(
    make_predicting_options,
    prediction=st.sampled_from(PREDICTIONS),
    num_blocks=st.integers(16, 60),
    page_size=st.sampled_from([4, 7]),
    max_tokens_per_forward=st.integers(1, 40),
    max_seqs_per_forward=st.integers(1, 12),
    spec_allocation_target_kv_cache_utilization=st.sampled_from([1.0, 0.5]),
    **varied_options,
)

# Many long sequences in few blocks: with EndsNext as the forecast, preemption is constant.
crowding_shapes_strategy = st.lists(
    random_shape(
        num_sequences=st.integers(2, 4),
        max_new_tokens=st.integers(8, 36),
        stop_strings=st.sampled_from([(), *STOP_STRINGS]),
        ignore_eos=st.just(False),
        **varied_fields,
    ),
    min_size=3,
    max_size=8,
)
crowded_options_strategy = st.builds(
    make_predicting_options,
    prediction=st.just(NEVER_LEARNS),
    num_blocks=st.integers(14, 24),
    page_size=st.sampled_from([4, 5]),
    max_tokens_per_forward=st.integers(8, 60),
    max_seqs_per_forward=st.integers(4, 16),
    **varied_options,
)

runs = {
    "shapes": shapes_strategy,
    "options": options_strategy,
    "seed": st.integers(0, 2**32),
    "cancel_share": st.sampled_from([0.0, 0.3]),
}
"""What a test is given that runs an engine until all requests have ended."""
crowded_runs = {**runs, "shapes": crowding_shapes_strategy, "options": crowded_options_strategy}
