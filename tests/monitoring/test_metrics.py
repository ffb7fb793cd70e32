from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tokasaurus.messages.lifecycle import EngineStats
from tokasaurus.monitoring.metrics import EngineCollector, render_metrics

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_stat_of_every_replica_that_is_up_is_one_sample() -> None:
    stats = [
        EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5, 11, 12, 13, 14),
        None,
        EngineStats(10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 5.0, 110, 120, 130, 140),
    ]
    families = list(text_string_to_metric_families(render_metrics(EngineCollector(lambda: stats)).decode()))
    samples = {
        (sample.name, sample.labels["replica"]): sample.value for family in families for sample in family.samples
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
    }
    assert len({family.documentation for family in families}) == len(expected)


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
