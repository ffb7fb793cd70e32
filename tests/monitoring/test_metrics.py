import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tokasaurus.messages.lifecycle import EngineStats
from tokasaurus.monitoring.metrics import EngineCollector, render_metrics

PHASE_SECONDS = (1.0, 2.0, 3.0, 4.0, 5.0)
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_stat_of_every_replica_that_is_up_is_one_sample() -> None:
    stats = [
        EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5, 11, 12, 13, 14, 15.5, PHASE_SECONDS, 16.5),
        None,
        EngineStats(10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 5.0, 110, 120, 130, 140, 155.0, (), 165.0),
    ]
    families = list(text_string_to_metric_families(render_metrics(EngineCollector(lambda: stats)).decode()))
    samples = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in families
        for sample in family.samples
        if list(sample.labels) == ["replica"]
    }
    expected = {
        "toka_requests_running": 1,
        "toka_requests_waiting": 2,
        "toka_kv_blocks_used": 3,
        "toka_kv_blocks_total": 4,
        "toka_prompt_tokens_total": 5,
        "toka_generation_tokens_total": 6,
        "toka_worker_queue_depth": 7,
        "toka_prefix_cache_hit_tokens_total": 8,
        "toka_preemptions_total": 9,
        "toka_recomputed_tokens_total": 10,
        "toka_asked_prompt_tokens_total": 11,
        "toka_computed_prompt_tokens_total": 12,
        "toka_shared_prompt_tokens_total": 13,
        "toka_recompiles_total": 14,
        "toka_manager_busy_fraction": 0.5,
        "toka_forward_seconds_total": 15.5,
        "toka_manager_cpu_seconds_total": 16.5,
    }
    assert samples == {
        (name, replica): value * scale for name, value in expected.items() for replica, scale in (("0", 1), ("2", 10))
    }
    assert all(family.documentation for family in families)
    assert {family.name for family in families if family.type == "counter"} == {
        "toka_prompt_tokens",
        "toka_generation_tokens",
        "toka_prefix_cache_hit_tokens",
        "toka_preemptions",
        "toka_recomputed_tokens",
        "toka_asked_prompt_tokens",
        "toka_computed_prompt_tokens",
        "toka_shared_prompt_tokens",
        "toka_recompiles",
        "toka_forward_seconds",
        "toka_manager_cpu_seconds",
        "toka_forward_phase_seconds",
        "toka_server_cpu_seconds",
    }
    assert len({family.documentation for family in families}) == len(families)


def test_phases_of_forwards_are_samples_where_the_worker_counts_them() -> None:
    stats = [EngineStats(0, 0, 9, 9, 0, 0, 0), EngineStats(0, 0, 9, 9, 0, 0, 0, phase_seconds=PHASE_SECONDS)]
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: stats)).decode())
    phases = next(family for family in families if family.name == "toka_forward_phase_seconds")
    assert [(sample.labels["replica"], sample.labels["phase"], sample.value) for sample in phases.samples] == [
        ("1", "gemm", 1.0),
        ("1", "heads", 2.0),
        ("1", "prefix_attention", 3.0),
        ("1", "attention", 4.0),
        ("1", "sampling", 5.0),
    ]


def test_cpu_time_of_the_server_is_that_of_this_process() -> None:
    started_s = time.process_time()
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: [])).decode())
    sample = next(family for family in families if family.name == "toka_server_cpu_seconds").samples[0]
    assert started_s <= sample.value <= time.process_time()


def test_every_metric_is_in_the_docs() -> None:
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: [])).decode())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    documented = [line.split("`")[1] for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `")]
    assert sorted(documented) == sorted(names)


def test_each_scrape_reads_the_latest_stats() -> None:
    stats: list[EngineStats | None] = [None]
    collector = EngineCollector(lambda: stats)
    assert b'replica="0"' not in render_metrics(collector)
    stats[0] = EngineStats(0, 0, 9, 9, 0, 0, 0)
    assert b'toka_kv_blocks_used{replica="0"} 9.0' in render_metrics(collector)
