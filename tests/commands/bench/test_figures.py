import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers.examples import seeds
from tokasaurus.commands.bench.client import RequestResult
from tokasaurus.commands.bench.figures import full_load, summarize, tokens_within
from tokasaurus.commands.bench.results import machine_facts


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
    assert summary.e2el_s is not None
    assert summary.e2el_s.mean == pytest.approx(np.mean(latencies))
    assert summary.e2el_s.std == pytest.approx(np.std(latencies))
    assert summary.e2el_s.max == max(latencies)
    assert {name: round(value, 9) for name, value in summary.e2el_s.percentiles.items()} == {
        f"p{percent}": round(float(np.percentile(latencies, percent)), 9) for percent in (50, 90, 95, 99)
    }
    assert summary.ttft_s is summary.tpot_s is summary.itl_s is summary.e2el_from_arrival_s is None


def test_summary_of_failures_alone_has_no_latency() -> None:
    results = [dataclasses.replace(result, error="HTTP 500") for result in random_results(0)]
    summary = summarize(results)
    assert summary.num_failed == len(results)
    assert summary.e2el_s is summary.full_load is None
    assert summary.completion_tokens == 0


def test_machine_facts_name_the_processor() -> None:
    facts = machine_facts()
    assert facts["cpu_model"]
    assert int(str(facts["num_cores"])) >= 1


def streamed(index: int, sent_s: float, events_s: tuple[float, ...], num_tokens: int, **fields: Any) -> RequestResult:
    gaps_s = tuple(after - before for before, after in itertools.pairwise(events_s))
    times = (sent_s, sent_s + events_s[-1], events_s[-1])
    return RequestResult(index, *times, 9, 0, num_tokens, None, events_s=events_s, gaps_s=gaps_s, **fields)


def test_times_of_streams_by_hand() -> None:
    results = [
        streamed(0, 0.0, (0.5, 0.7, 1.5), 3),
        streamed(1, 1.0, (0.25,), 1, waited_s=0.5),
        streamed(2, 1.0, (1.0, 3.0), 5, waited_s=0.0),  # an event may have several tokens
    ]
    summary = summarize(results, goodput_ms={"ttft": 600, "tpot": 500}, price_per_hour=3.6)
    for found, values in (
        (summary.ttft_s, [0.5, 0.25, 1.0]),
        (summary.tpot_s, [(1.5 - 0.5) / 2, (3.0 - 1.0) / 4]),
        (summary.itl_s, [0.2, 0.8, 2.0]),
        (summary.e2el_s, [1.5, 0.25, 3.0]),
        (summary.e2el_from_arrival_s, [0.75, 3.0]),
    ):
        assert found is not None
        assert found.mean == pytest.approx(np.mean(values))
        assert found.percentiles["p90"] == pytest.approx(np.percentile(values, 90))
    assert summary.wall_s == 4.0
    assert summary.goodput_per_s == 2 / 4.0  # the third has its first token too late
    assert summary.cost_per_million_tokens == pytest.approx(3.6 * 4 / 3600 / 9 * 1e6)


def test_time_per_token_of_samples_counts_the_tokens_of_each() -> None:
    result = streamed(0, 0.0, (0.5, 0.6, 1.4, 1.5), 8, num_samples=2)
    summary = summarize([result])
    assert summary.tpot_s is not None
    assert summary.tpot_s.max == pytest.approx((1.5 - 0.5) / 3)


def test_full_load_leaves_out_the_beginning_and_the_end() -> None:
    # Ten in flight from 9 to 20 s; one is sent and one ends each second before and after.
    results = [RequestResult(index, index, 20.0 + index, 20.0, 1, 0, 20, None) for index in range(10)]
    found = full_load(results)
    assert found is not None
    # nine or ten: from 8 s until the second one ends
    assert found.seconds == pytest.approx(21.0 - 8.0)
    by_hand = sum(min(21.0, 20.0 + index) - max(8.0, index) for index in range(10))
    assert found.output_tokens_per_s == pytest.approx(by_hand / 13.0)


def test_tokens_of_a_stream_count_when_they_come() -> None:
    result = streamed(0, 1.0, (1.0, 2.0, 3.0, 4.0), 8)
    assert tokens_within(result, 0.0, 10.0) == 8
    assert tokens_within(result, 2.5, 4.5) == 4
    assert tokens_within(result, 6.0, 7.0) == 0
