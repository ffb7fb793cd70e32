"""What a replica can do, from what each of its workers can do."""

from tokasaurus.manager.planning.worker_limits import common_limits
from tokasaurus.messages.lifecycle import EngineLimits, HydragenCosts


def test_one_worker_has_its_own_limits() -> None:
    limits = EngineLimits(9, 4, 30, HydragenCosts(1.0, 2.0, 3.0, 4.0, 5.0), 0.5)
    assert common_limits([limits]) == limits


def test_the_worker_with_the_least_decides_for_each_limit() -> None:
    limits = [
        EngineLimits(7, 4, 28, HydragenCosts(1.0, 0.5, 3.0, 0.0), 0.1, 0.01, "kv_cache_num_tokens"),
        EngineLimits(9, 4, 20, HydragenCosts(2.0, 0.4, 4.0, 0.1, 9.0), 0.3, 0.02, "max_num_tokens_per_request", 1e-7),
        EngineLimits(8, 4, 30, HydragenCosts(0.0, 0.6, 2.0, 0.0, 7.0), 0.2, 0.04),
    ]
    expected = EngineLimits(
        7, 4, 20, HydragenCosts(2.0, 0.6, 4.0, 0.1, 9.0), 0.3, 0.04, "max_num_tokens_per_request", 1e-7
    )
    assert common_limits(limits) == expected
