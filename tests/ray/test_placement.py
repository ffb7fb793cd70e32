"""What Ray reserves, by flags."""

from typing import Any

import pytest

from tokasaurus.config import ServerConfig
from tokasaurus.library.llm import flag_words
from tokasaurus.ray.placement import Placement, checked_words, place, words_on


@pytest.mark.parametrize(
    ("flags", "num_cpus", "cluster_gpus", "expected"),
    [
        ({}, None, 0.0, Placement(0, 1, 1)),
        ({}, None, 8.0, Placement(1, 1, 1)),
        ({"device": "cpu"}, None, 8.0, Placement(0, 1, 1)),
        ({"device": "cpu", "tp_size": 2, "dp_size": 2}, None, 0.0, Placement(0, 4, 4)),
        ({"device": "cpu", "tp_size": 2}, 6.0, 0.0, Placement(0, 6, 2)),
        ({"tp_size": 2, "pp_size": 2}, None, 8.0, Placement(4, 4, 4)),
        ({"device": "cuda", "tp_size": 4}, 2.0, 0.0, Placement(4, 2, 4)),
    ],
)
def test_a_bundle_has_a_device_for_each_process_that_computes(
    flags: dict[str, Any], num_cpus: float | None, cluster_gpus: float, expected: Placement
) -> None:
    """A cluster that scales from no GPU nodes needs device=cuda."""
    words = checked_words(flags)
    placement = place(ServerConfig.parse(words), num_cpus, cluster_gpus)
    assert placement == expected
    assert len(placement.bundles) == 1, "an actor sees the GPUs of its own bundle alone"
    assert placement.bundles[0].get("GPU", 0) == placement.actor_options["num_gpus"] == expected.num_gpus
    assert ("GPU" in placement.bundles[0]) == (expected.num_gpus > 0)
    assert placement.bundles[0]["CPU"] == placement.actor_options["num_cpus"] == expected.num_cpus
    device = ServerConfig.parse(words_on(placement, words)).device
    assert device == ("cuda" if expected.num_gpus else "cpu")


@pytest.mark.parametrize(
    ("placement", "threads"),
    [
        (Placement(0, 4, 1), None),  # Ray's own number
        (Placement(0, 6, 2), "3"),
        (Placement(0, 1, 2), "1"),
        (Placement(2, 2, 2), None),
    ],
)
def test_workers_on_a_cpu_divide_the_reserved_cores(placement: Placement, threads: str | None) -> None:
    environment = placement.actor_options.get("runtime_env", {}).get("env_vars", {})
    assert environment.get("OMP_NUM_THREADS") == threads


def test_flags_are_written_as_on_a_command_line() -> None:
    words = checked_words({"model": "a/b", "use_hydragen": False, "kv_cache_num_tokens": 4096})
    config = ServerConfig.parse(words)
    assert (config.model, config.use_hydragen, config.kv_cache_num_tokens) == ("a/b", False, 4096)
    assert flag_words({"log_level": "info"})[0] in checked_words({"log_level": "info"})


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        ({"modell": "a"}, TypeError, "modell"),
        ({"port": 1}, TypeError, "port cannot be chosen"),
        ({"data_dir": "/a"}, TypeError, "data_dir cannot be chosen"),
        ({"tp_size": 0}, ValueError, "tp_size"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        checked_words(flags)
