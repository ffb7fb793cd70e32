"""What the manager's process tells the server, and how it reads its flags."""

import dataclasses

import pytest

from tests.manager.helpers.fake_worker import decode_text
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import engine_options, is_worth_an_update
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions, LengthPredictorOptions
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats, HydragenThresholds


def make_stats(**changed: int) -> EngineStats:
    values = dict.fromkeys(EngineStats.__slots__, 0)
    return EngineStats(**{**values, "num_kv_blocks_total": 9, **changed})


@pytest.mark.parametrize(
    ("now", "last", "seconds", "expected"),
    [
        ({}, {}, 100.0, False),
        ({"num_running": 1}, {}, 0.0, True),
        ({"num_waiting": 1}, {}, 0.0, True),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.1, False),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.3, True),
        ({"worker_queue_depth": 1}, {"worker_queue_depth": 2}, 0.1, False),
        ({}, {"worker_queue_depth": 1}, 0.0, True),
    ],
)
def test_the_server_hears_of_starts_ends_and_idleness_at_once(now, last, seconds, expected):
    assert is_worth_an_update(make_stats(**now), make_stats(**last), seconds) is expected


LIMITS = EngineLimits(num_kv_blocks=9, page_size=4, max_tokens_per_sequence=30)


class Decoder:
    special_ids = frozenset({3})
    decode = staticmethod(decode_text)


def options_for(limits: EngineLimits = LIMITS, **flags: object) -> EngineOptions:
    config = ServerConfig()
    for name, value in flags.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return engine_options(config, (1, 2), limits, Decoder(), None)


def test_every_flag_of_the_manager_has_its_effect():
    default = options_for()
    assert default.limits is LIMITS
    assert default.eos_ids == {1, 2}
    assert default.special_ids == {3}
    assert default.decode_text is decode_text
    early = default.early_stopping
    assert early is not None
    for flag, value, field in [
        ("max_tokens_per_forward", 77, "max_tokens_per_forward"),
        ("max_seqs_per_forward", 55, "max_seqs_per_forward"),
        ("scheduling_steps_ahead", 3, "max_steps_ahead"),
        ("stop_string_num_token_lookback", 9, "min_lookback_tokens"),
        ("precise_onboard_batch_size", 5, "onboard_batch_size"),
        ("spec_allocation_target_kv_cache_utilization", 0.5, "target_utilization"),
        ("deferred_tasks", "deferred", "deferred_tasks"),
    ]:
        assert options_for(**{flag: value}) == dataclasses.replace(default, **{field: value})
    for flag, value, field in [
        ("track_early_stopping", False, "learns"),
        ("early_stopping_buffer_size", 17, "buffer_size"),
        ("early_stopping_num_prediction_buckets", 19, "num_prediction_buckets"),
        ("early_stopping_initial_wait", 3, "initial_wait"),
        ("early_stopping_init_mean", 0.5, "init_mean"),
        ("early_stopping_init_std", 0.1, "init_std"),
        ("spec_allocation_std_buffer_scale", 2.0, "std_buffer_scale"),
    ]:
        changed = dataclasses.replace(early, **{field: value})
        assert options_for(**{flag: value}) == dataclasses.replace(default, early_stopping=changed)
    assert default.prefill_multiple is None
    assert options_for(prefill_round_up_multiple=8) == default
    rated = options_for(greedy_prefill=False, prefill_round_up_multiple=8)
    assert rated == dataclasses.replace(default, prefill_multiple=8)
    assert options_for(enable_precise_onboard=False) == dataclasses.replace(default, onboard_batch_size=None)
    assert options_for(use_spec_allocation=False) == dataclasses.replace(default, early_stopping=None)


def test_a_prefix_to_share_is_asked_for_in_tokens_and_measured_in_whole_blocks():
    assert options_for(hydragen_min_prefix_len=256).hydragen == HydragenOptions(32, 64)
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (17, 5)):
        options = options_for(use_hydragen=True, hydragen_min_prefix_len=num_tokens, hydragen_min_group_size=3)
        assert options.hydragen == HydragenOptions(min_group_size=3, min_blocks=num_blocks)
    assert options_for(use_hydragen=False).hydragen is None


@pytest.mark.parametrize(
    ("measured", "flags", "expected"),
    [
        (HydragenThresholds(4, 128), {}, HydragenOptions(4, 32)),
        (HydragenThresholds(4, 128), {"use_hydragen": True, "hydragen_min_group_size": 2}, HydragenOptions(2, 32)),
        (HydragenThresholds(4, 128), {"hydragen_min_prefix_len": 8}, HydragenOptions(4, 2)),
        (HydragenThresholds(4, 128), {"use_hydragen": False, "hydragen_min_group_size": 2}, None),
        (None, {}, None),
        (None, {"use_hydragen": True}, HydragenOptions(32, 64)),
        (None, {"hydragen_min_group_size": 2}, HydragenOptions(2, 64)),
    ],
)
def test_groups_are_made_where_the_worker_found_that_they_pay_or_where_they_are_asked_for(measured, flags, expected):
    limits = dataclasses.replace(LIMITS, hydragen=measured)
    assert options_for(limits, **flags).hydragen == expected


def test_flags_at_their_defaults_are_the_options_at_theirs():
    default = options_for()
    assert default.early_stopping == LengthPredictorOptions()
    for field in dataclasses.fields(EngineOptions):
        # The default for hydragen is in tokens, so depends on the page size.
        if field.default is not dataclasses.MISSING and field.name != "hydragen":
            assert getattr(default, field.name) == field.default
