"""Counting times and lengths of requests, against prometheus_client's histograms and sums by hand."""

from collections.abc import Sequence

import numpy as np
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, SequenceTimes
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.monitoring.request_metrics import (
    FIRST_TOKEN_SECONDS,
    PER_TOKEN_SECONDS,
    PHASE_SECONDS,
    SAMPLES,
    TOKENS,
    Histogram,
    RequestMetrics,
)


def make_request(num_prompt_tokens: int = 3, num_sequences: int = 1, arrived_s: float = 100.0) -> GenerateRequest:
    return GenerateRequest(
        request_id="a",
        prompt_ids=np.zeros(num_prompt_tokens, np.int32),
        num_sequences=num_sequences,
        max_new_tokens=100,
        sampling=SamplingParams(),
        seed=0,
        stop_strings=(),
        ignore_eos=False,
        want_logprobs=False,
        arrived_s=arrived_s,
    )


def last_delta(times: SequenceTimes | None, error: str = "") -> SequenceDelta:
    return SequenceDelta("a", 0, [], None, "stop", 0, 0, 0, 0, error=error, times=times)


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_SECONDS, PER_TOKEN_SECONDS, PHASE_SECONDS, TOKENS, SAMPLES])
@given(values=st.lists(st.tuples(st.floats(0, 1e5), st.integers(1, 5))))
def test_a_histogram_equals_the_clients(bounds: Sequence[float], values: list[tuple[float, int]]) -> None:
    ours = Histogram(bounds)
    theirs = prometheus_client.Histogram("x", "x", buckets=bounds, registry=None)
    values += [(bound, 1) for bound in bounds[::3]]
    for value, count in values:
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    (family,) = theirs.collect()
    buckets = [sample.value for sample in family.samples if sample.name == "x_bucket"]
    (total,) = (sample.value for sample in family.samples if sample.name == "x_sum")
    assert ours.cumulative() == buckets
    assert ours.sum == pytest.approx(total)


def sums(metrics: RequestMetrics) -> dict[str, tuple[int, float]]:
    """(count, sum) of the histograms that are not empty."""
    found = {name: getattr(metrics, name) for name in RequestMetrics.__dataclass_fields__ if name != "finished"}
    counts = {name: (histogram.cumulative()[-1], histogram.sum) for name, histogram in found.items()}
    return {name: values for name, values in counts.items() if values != (0, 0.0)}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (
            SequenceTimes(101.0, 103.0, 109.0, 4),
            {
                "queue": (1, 1.0),
                "prefill": (1, 2.0),
                "time_to_first_token": (1, 3.0),
                "decode": (1, 6.0),
                "time_per_output_token": (1, 2.0),
                "between_tokens": (3, 6.0),
                "completion_tokens": (1, 4.0),
            },
        ),
        (
            SequenceTimes(101.0, 103.0, 103.5, 1),
            {
                "queue": (1, 1.0),
                "prefill": (1, 2.0),
                "time_to_first_token": (1, 3.0),
                "decode": (1, 0.5),
                "completion_tokens": (1, 1.0),
            },
        ),
        # only the logprobs of its prompt were wanted
        (
            SequenceTimes(101.0, 103.0, 103.5, 0),
            {"queue": (1, 1.0), "prefill": (1, 2.0), "completion_tokens": (1, 0.0)},
        ),
        # aborted while it waited, and while its prompt was computed
        (SequenceTimes(0.0, 0.0, 103.5, 0), {"completion_tokens": (1, 0.0)}),
        (SequenceTimes(101.0, 0.0, 103.5, 0), {"queue": (1, 1.0), "completion_tokens": (1, 0.0)}),
        (None, {}),
    ],
)
def test_a_sequence_is_in_the_histograms_of_the_phases_that_it_has_reached(
    times: SequenceTimes | None, expected: dict[str, tuple[int, float]]
) -> None:
    metrics = RequestMetrics()
    metrics.note_sequence(make_request(), last_delta(times))
    assert sums(metrics) == expected
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0, "cancelled": 0}


def test_a_sequence_that_failed_has_no_times() -> None:
    metrics = RequestMetrics()
    metrics.note_sequence(make_request(), last_delta(SequenceTimes(101.0, 103.0, 109.0, 4), error="NaN"))
    assert sums(metrics) == {}
    assert metrics.finished["error"] == 1


def test_a_request_counts_once_however_it_ends() -> None:
    metrics = RequestMetrics()
    metrics.note_request(make_request(num_prompt_tokens=5, num_sequences=3), longest=7)
    metrics.note_broken_request(make_request(num_prompt_tokens=2, num_sequences=4), 3, "cancelled")
    found = sums(metrics)
    assert found["prompt_tokens"] == (2, 7.0)
    assert found["num_samples"] == (2, 7.0)
    assert found["longest_completion"] == (1, 7.0)
    assert found["request"][0] == 1
    assert metrics.finished["cancelled"] == 3
