import dataclasses

import numpy as np
import pytest

from benchmarks.results import machine_facts
from benchmarks.throughput.client import RequestResult
from benchmarks.throughput.report import percentile, summarize
from tests.helpers.examples import seeds


def random_results(seed: int, num_failed: int = 0) -> list[RequestResult]:
    rng = np.random.default_rng(seed)
    results = []
    for index in range(int(rng.integers(1, 80)) + num_failed):
        sent_s, latency_s = rng.uniform(1, 5), rng.lognormal()
        tokens = [int(count) for count in rng.integers(0, 1000, 3)]
        results.append(RequestResult(index, sent_s, sent_s + latency_s, latency_s, *tokens, error=None))
    for index in range(num_failed):
        results[index] = dataclasses.replace(
            results[index], prompt_tokens=0, cached_tokens=0, completion_tokens=0, error="HTTP 500"
        )
    return results


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentile_equals_numpys(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@pytest.mark.parametrize("seed", seeds(10))
def test_summary_equals_totals_by_hand(seed: int) -> None:
    results = random_results(seed, num_failed=seed % 3)
    summary = summarize(results)
    good = [result for result in results if result.error is None]
    latencies = [result.latency_s for result in good]
    wall_s = np.max([result.finished_s for result in results]) - np.min([result.sent_s for result in results])
    output = np.sum([result.completion_tokens for result in good])
    assert (summary.num_requests, summary.num_failed) == (len(results), seed % 3)
    assert summary.wall_s == pytest.approx(wall_s)
    assert summary.output_tokens_per_s == pytest.approx(output / wall_s)
    prompt = np.sum([result.prompt_tokens for result in good])
    assert summary.total_tokens_per_s == pytest.approx((output + prompt) / wall_s)
    assert summary.requests_per_s == pytest.approx(len(good) / wall_s)
    assert summary.latency_mean_s == pytest.approx(np.mean(latencies))
    assert summary.latency_max_s == max(latencies)
    for percent, value in ((50, summary.latency_p50_s), (90, summary.latency_p90_s), (99, summary.latency_p99_s)):
        assert value == pytest.approx(np.percentile(latencies, percent))


def test_summary_of_failures_alone_has_no_latency() -> None:
    results = [dataclasses.replace(result, error="HTTP 500") for result in random_results(0)]
    summary = summarize(results)
    assert summary.num_failed == len(results)
    assert summary.latency_p50_s is None
    assert summary.completion_tokens == 0


def test_machine_facts_name_the_processor() -> None:
    facts = machine_facts()
    assert facts["cpu_model"]
    assert int(str(facts["num_cores"])) >= 1
