"""The Prometheus page: every stat, its units and its documentation."""

import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tokasaurus.messages.status import AdapterLoad, EngineStats
from tokasaurus.monitoring.metrics import BatchStats, EngineCollector, VllmLabels, render_metrics

PHASE_SECONDS = (1.0, 2.0, 3.0, 4.0, 5.0)
NOT_A_SAMPLE = (
    *("phase_seconds", "expert_tokens", "adapters"),  # have more labels
    "total_finished_requests",  # for the manager's line; toka_request_seconds_count is the server's own count
)
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_stat_of_every_replica_that_is_up_is_one_sample() -> None:
    names = [name for name in EngineStats.__dataclass_fields__ if name not in NOT_A_SAMPLE]
    first = EngineStats(**{name: number for number, name in enumerate(names, 1)}, phase_seconds=PHASE_SECONDS)
    second = EngineStats(**{name: 100 * number for number, name in enumerate(names, 1)})
    restarts = [len(names) + 1, 7, 100 * (len(names) + 1)]  # counted also while a replica is not up
    collector = EngineCollector(lambda: [first, None, second], lambda: restarts)
    families = list(text_string_to_metric_families(render_metrics(collector).decode()))
    found: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            if list(sample.labels) == ["replica"]:
                found.setdefault(sample.name, {})[sample.labels["replica"]] = sample.value
    assert found["toka_engine_restarts_total"].pop("1") == 7
    by_value = {samples["0"]: name for name, samples in found.items()}
    assert sorted(by_value) == list(range(1, len(names) + 2))
    assert all(samples == {"0": samples["0"], "2": 100 * samples["0"]} for samples in found.values())
    counters = {sample.name for family in families if family.type == "counter" for sample in family.samples}
    for number, name in enumerate(names, 1):
        if name.startswith("total_"):
            assert by_value[number] == f"toka_{name.removeprefix('total_')}_total"
        assert (by_value[number] in counters) == ("total_" in name or name.endswith("_seconds"))
    assert all(family.documentation for family in families)
    assert len({family.documentation for family in families}) == len(families)


def test_forward_phases_are_exported_for_workers_that_measure_them() -> None:
    stats = [EngineStats(0, 0, 9, 9, 0, 0, 0), EngineStats(0, 0, 9, 9, 0, 0, 0, phase_seconds=PHASE_SECONDS)]
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: stats, lambda: [0])).decode())
    phases = next(family for family in families if family.name == "toka_forward_phase_seconds")
    assert [(sample.labels["replica"], sample.labels["phase"], sample.value) for sample in phases.samples] == [
        ("1", "gemm", 1.0),
        ("1", "heads", 2.0),
        ("1", "prefix_attention", 3.0),
        ("1", "attention", 4.0),
        ("1", "sampling", 5.0),
    ]


def test_tokens_of_experts_are_exported_by_layer() -> None:
    stats = [EngineStats(0, 0, 9, 9, 0, 0, 0, expert_tokens=((), (5, 0, 2)))]
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: stats, lambda: [0])).decode())
    (family,) = (each for each in families if each.name == "toka_expert_tokens")
    found = [(sample.labels["replica"], sample.labels["layer"], sample.value) for sample in family.samples]
    assert found == [("0", "1", 5), ("0", "1", 0), ("0", "1", 2)]
    assert [sample.labels["expert"] for sample in family.samples] == ["0", "1", "2"]


def test_sequences_are_counted_by_the_names_of_their_adapters() -> None:
    loads = AdapterLoad("ab" * 32, 3, 1), AdapterLoad("cd" * 32, 0, 5)
    stats = [EngineStats(0, 0, 9, 9, 0, 0, 0, adapters=loads)]
    collector = EngineCollector(lambda: stats, lambda: [0], adapters={"sql": "ab" * 32, "new": "ef" * 32})
    lines = render_metrics(collector).decode().splitlines()
    assert [line for line in lines if line.startswith("toka_adapter")] == [
        "toka_adapters_loaded 2.0",
        'toka_adapter_sequences{adapter="sql",replica="0",state="running"} 3.0',
        'toka_adapter_sequences{adapter="sql",replica="0",state="waiting"} 1.0',
        'toka_adapter_sequences{adapter="@cdcdcdcdcdcd",replica="0",state="running"} 0.0',
        'toka_adapter_sequences{adapter="@cdcdcdcdcdcd",replica="0",state="waiting"} 5.0',
    ]


def test_counters_alone_end_with_total() -> None:
    collector = EngineCollector(lambda: [], lambda: [], batches=BatchStats(0, 0, 0, 0, False), vllm=VllmLabels("m"))
    names = [family.name for family in collector.collect()]  # a counter's, without the _total of its samples
    assert [name for name in names if name.endswith("_total")] == []


def test_features_that_are_switched_off_are_a_sample_each() -> None:
    collector = EngineCollector(lambda: [], lambda: [0, 0], read_switched_off=lambda: [("a",), ("a", "b=c")])
    families = text_string_to_metric_families(render_metrics(collector).decode())
    family = next(family for family in families if family.name == "toka_switched_off")
    found = [(sample.labels["replica"], sample.labels["feature"], sample.value) for sample in family.samples]
    assert found == [("0", "a", 1.0), ("1", "a", 1.0), ("1", "b=c", 1.0)]


def test_server_cpu_time_is_the_cpu_time_of_this_process() -> None:
    started_s = time.process_time()
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: [], lambda: [])).decode())
    sample = next(family for family in families if family.name == "toka_server_cpu_seconds").samples[0]
    assert started_s <= sample.value <= time.process_time()


def test_the_metrics_of_every_process_are_in_the_docs() -> None:
    """The others are in the page's reference, which is made from them."""
    families = text_string_to_metric_families(render_metrics(EngineCollector(lambda: [], lambda: [])).decode())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    named = re.findall(r"`(process_\w+)`", METRICS_PAGE.read_text())
    assert sorted(named) == sorted(name for name in names if name.startswith("process_"))


def test_batches_are_counted_by_what_became_of_their_lines() -> None:
    collector = EngineCollector(lambda: [], lambda: [], batches=BatchStats(1, 2, 3, 4, True))
    lines = render_metrics(collector).decode().splitlines()
    assert [line for line in lines if line.startswith("toka_batch")] == [
        "toka_batches_unfinished 1.0",
        "toka_batch_lines_running 2.0",
        'toka_batch_lines_total{result="completed"} 3.0',
        'toka_batch_lines_total{result="failed"} 4.0',
        "toka_batch_storage_failing 1.0",
    ]
    without = render_metrics(EngineCollector(lambda: [], lambda: [])).decode()
    assert "toka_batch" not in without


def test_each_scrape_reads_the_latest_stats() -> None:
    stats: list[EngineStats | None] = [None]
    collector = EngineCollector(lambda: stats, lambda: [])
    assert b'replica="0"' not in render_metrics(collector)
    stats[0] = EngineStats(0, 0, 9, 9, 0, 0, 0)
    assert b'toka_kv_blocks_used{replica="0"} 9.0' in render_metrics(collector)
