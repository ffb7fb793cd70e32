"""Figures of runs that were made by hand, and of the router's index."""

import math

import numpy as np
import pytest

from benchmarks.scale import router
from benchmarks.scale.figures import figures_of
from benchmarks.scale.load import HEAVY, PlannedRequest
from benchmarks.scale.simulation import Answer, Run
from tokasaurus.messages.status import EngineLimits


def answer(number: int, ended_s: float, prefix: int, client: str, num_runs: int = 1) -> Answer:
    request = PlannedRequest(number, 0, client, prefix, np.zeros(20, np.int32), 10, 80)
    return Answer(request, ended_s - 1.0, ended_s, 10, num_cached_tokens=40, num_ends=1, num_runs=num_runs)


def steady(until_s: float, every_s: float, from_s: float = 0.0) -> list[Answer]:
    times = np.arange(from_s + every_s, until_s + 1e-9, every_s)
    return [answer(number, float(at_s), number % 2, HEAVY) for number, at_s in enumerate(times)]


def test_throughput_and_shares_of_a_steady_run() -> None:
    answers = steady(10.0, 0.01)
    answers.append(answer(-1, 10.0, 2, "light"))
    run = Run(answers, ended_s=10.0, busy_s=15.0, tokens_of_replicas=[6000, 4010], routing_s=0.1)
    figures = figures_of(run)
    assert figures.tokens_per_s == pytest.approx(1000, rel=0.01)
    assert figures.cached_share == pytest.approx(0.4)
    assert figures.best_share == pytest.approx(0.8 * (len(answers) - 3) / len(answers))  # not the first of each prefix
    assert figures.busy_share == pytest.approx(0.75)
    assert figures.busiest == pytest.approx(6000 / 5005)
    assert figures.median_s == pytest.approx(1.0)
    assert (figures.num_again, figures.recovered_s, figures.updated_s) == (0, 0.0, 0.0)


def test_recovery_ends_with_the_first_window_that_is_as_fast_as_before() -> None:
    slow = steady(6.0, 0.03, from_s=5.0)
    fast = steady(10.0, 0.01, from_s=6.0)
    run = Run([*steady(5.0, 0.01), *slow, *fast], ended_s=10.0, died_s=5.0, tokens_of_replicas=[1])
    run.answers.append(answer(-1, 7.5, 0, "light", num_runs=2))
    figures = figures_of(run)
    assert figures.recovered_s == pytest.approx(1.0)
    assert figures.num_again == 1
    assert figures.slowest_again_s == pytest.approx(2.5)
    never = Run([*steady(5.0, 0.01), *steady(9.0, 0.03, from_s=5.0)], 9.0, died_s=5.0, tokens_of_replicas=[1])
    never.answers.append(answer(-1, 9.0, 0, "light"))
    assert figures_of(never).recovered_s == math.inf


def test_the_routers_cost_grows_with_replicas_and_its_index_stays_within_the_cache() -> None:
    limits = EngineLimits(128, 16, 1024)
    few, many = (router.measure(number, limits, prompt_tokens=256) for number in (2, 64))
    assert 0 < few.num_index_tokens <= 128 * 16
    assert 0.5 * few.index_bytes < many.index_bytes < 2 * few.index_bytes  # of one replica
    assert many.choice_us > few.choice_us
