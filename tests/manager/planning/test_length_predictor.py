"""Tests expected completion lengths against a slow count and against populations of known lengths."""

from collections.abc import Callable
from math import ceil, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.length_oracle import (
    Batch,
    LengthOracle,
    Situation,
    batches,
    ints,
    record_all,
    situations,
    with_step_numbers,
)
from tokasaurus.manager.planning.length_predictor import (
    CompletionLengths,
    Forecast,
    Ints,
    ShareForecast,
    SurvivalForecast,
    fit_forecast,
    outlasting_shares,
)


def expected_by_rank(forecast: Forecast, num_generated: int, max_new_tokens: int) -> Ints:
    """Expected lengths of sequences of ranks 0 to 4095, all with `num_generated` tokens so far."""
    ranks = np.arange(4096)
    return forecast.expected(np.full_like(ranks, num_generated), np.full_like(ranks, max_new_tokens), ranks)


def distinct_expected(forecast: Forecast, num_generated: int, max_new_tokens: int) -> set[int]:
    return set(expected_by_rank(forecast, num_generated, max_new_tokens).tolist())


def mean_expected(forecast: Forecast, num_generated: int, max_new_tokens: int) -> float:
    return float(expected_by_rank(forecast, num_generated, max_new_tokens).mean())


@examples(500)
@given(
    situation=situations(),
    scale=st.sampled_from([0.0, 0.25, 1.0]),
    asked=st.lists(st.tuples(st.integers(0, 35), st.integers(1, 60), st.integers(0, 2**40)), min_size=1, max_size=8),
)
def test_expected_length_equals_a_count_of_every_token_and_length(
    situation: Situation, scale: float, asked: list[tuple[int, int, int]]
) -> None:
    num_generated = ints(*(have for have, _, _ in asked))
    max_new_tokens = num_generated + ints(*(room for _, room, _ in asked))
    ranks = ints(*(rank for _, _, rank in asked))
    found = situation.forecast(scale).expected(num_generated, max_new_tokens, ranks)
    for have, most, share, value in zip(num_generated, max_new_tokens, outlasting_shares(ranks), found, strict=True):
        oracle = LengthOracle(situation.chances, int(have))
        assert have < value <= most
        hazard, std = -log(share), oracle.std()
        # The forecast resolves hazard to 1/256, and rounds the margin up after subtracting 0.01 of a token. The small
        # terms allow for rounding of floats.
        shortest = oracle.min_length(hazard - 1e-9) + ceil(scale * std - 0.0101)
        longest = oracle.min_length(hazard + 1 / 256 + 1e-9) + ceil(scale * std - 0.0099)
        assert min(shortest, most) <= value <= min(longest, most), (have, most, share)


@examples(300)
@given(situation=situations(), have=st.integers(0, 30), room=st.integers(1, 60), first_rank=st.integers(0, 2**31))
def test_expected_lengths_of_many_sequences_follow_the_survival_curve(
    situation: Situation, have: int, room: int, first_rank: int
) -> None:
    num = 4096
    ranks = np.arange(first_rank, first_rank + num)
    found = situation.forecast(0.0).expected(np.full(num, have), np.full(num, have + room), ranks)
    oracle = LengthOracle(situation.chances, have)
    for length in range(have + 1, have + room):
        num_longer = num * oracle.share_longer(length)
        # The forecast resolves hazard to 1/256 and rounds up, so a factor of up to exp(1/256) more are longer.
        assert num_longer - 4 <= (found > length).sum() <= num_longer * exp(1 / 256) + 4, length
    assert found.mean() - have == pytest.approx(oracle.mean(have + room) - have, rel=0.005, abs=0.1)


@examples(500)
@given(first=st.integers(0, 2**40), num=st.integers(1, 5000), share=st.floats(0, 1))
def test_consecutive_ranks_get_evenly_spread_shares(first: int, num: int, share: float) -> None:
    shares = outlasting_shares(np.arange(first, first + num))
    assert (shares > 0).all()
    assert (shares <= 1).all()
    assert (shares <= share).sum() == pytest.approx(num * share, abs=4)


@examples(500)
@given(gaps=batches, buffer_size=st.integers(1, 12))
def test_the_last_ends_are_kept_and_window_start_is_the_step_of_the_last_forgotten_one(
    gaps: list[tuple[int, list[tuple[int, bool]]]], buffer_size: int
) -> None:
    history = with_step_numbers(gaps)
    lengths = record_all(buffer_size, history)
    everything = [(num, stopped, step) for step, ended in history for num, stopped in ended]
    remembered = list(zip(lengths.num_tokens.tolist(), lengths.stopped.tolist(), lengths.steps.tolist(), strict=True))
    assert sorted(remembered) == sorted(everything[-buffer_size:])
    assert lengths.num_recorded == len(everything)
    if len(everything) <= buffer_size:
        assert lengths.window_start is None
    else:
        assert lengths.window_start == everything[-buffer_size - 1][2]


def test_without_recorded_lengths_every_sequence_is_expected_to_reach_max_new_tokens() -> None:
    forecast = fit_forecast(CompletionLengths(16), ints(), 0, 1024, 0.25)
    assert distinct_expected(forecast, 0, 100) == {100}
    assert distinct_expected(forecast, 7, 8) == {8}
    assert distinct_expected(forecast, 99, 100_000) == {100_000}


def test_if_all_ended_at_one_length_every_rank_expects_that_length() -> None:
    forecast = fit_forecast(record_all(64, [(100, [(100, True)] * 50)]), ints(), 100, 1024, 0.25)
    for num_generated in range(100):
        assert distinct_expected(forecast, num_generated, 2048) == {100}


def test_a_sequence_longer_than_any_seen_is_expected_to_reach_max_new_tokens() -> None:
    forecast = fit_forecast(record_all(64, [(100, [(100, True)] * 50)]), ints(), 100, 1024, 0.25)
    assert distinct_expected(forecast, 100, 2048) == {2048}
    assert distinct_expected(forecast, 500, 2048) == {2048}


def test_a_sequence_past_a_length_where_all_ended_is_compared_with_longer_ones() -> None:
    # The window begins after step 100: in it, every sequence that sampled token 50 ended there, and none at 120.
    history: list[Batch] = [(100, [(9, True)]), (101, [(50, True)] * 50 + [(150, True)] * 50)]
    forecast = fit_forecast(record_all(100, history), ints(*[120] * 3), 101, 1024, 0.0)
    assert distinct_expected(forecast, 0, 2048) == {50}
    assert distinct_expected(forecast, 50, 2048) == {150}
    assert distinct_expected(forecast, 120, 2048) == {150}
    assert distinct_expected(forecast, 150, 2048) == {2048}


def test_a_rank_keeps_its_expected_length_until_a_length_at_which_sequences_end() -> None:
    forecast = fit_forecast(record_all(1024, [(300, [(100, True), (300, True)] * 100)]), ints(), 300, 1024, 0.0)
    at_start = expected_by_rank(forecast, 0, 2048)
    assert (at_start == 100).sum() == pytest.approx(2048, abs=20)
    assert (at_start == 300).sum() == pytest.approx(2048, abs=20)
    for num_generated in (1, 50, 99):
        assert expected_by_rank(forecast, num_generated, 2048).tolist() == at_start.tolist()
    assert distinct_expected(forecast, 100, 2048) == {300}


def test_sequences_cut_off_by_max_tokens_count_only_as_longer() -> None:
    cut = record_all(1024, [(100, [(50, False)] * 500), (200, [(100, True)] * 500)])
    assert distinct_expected(fit_forecast(cut, ints(), 200, 1024, 0.25), 0, 1000) == {100}
    stopped = record_all(1024, [(100, [(50, True)] * 500), (200, [(100, True)] * 500)])
    assert distinct_expected(fit_forecast(stopped, ints(), 200, 1024, 0.0), 0, 1000) == {50, 100}


def test_counting_running_sequences_prevents_a_bias_towards_early_finishers() -> None:
    lengths = record_all(1024, [(20, [(20, True)] * 100)])
    alone = fit_forecast(lengths, ints(), 20, 1024, 0.0)
    among_others = fit_forecast(lengths, np.full(900, 20), 20, 1024, 0.0)
    assert distinct_expected(alone, 0, 1000) == {20}
    assert distinct_expected(among_others, 0, 1000) == {20, 1000}
    assert mean_expected(among_others, 0, 1000) == pytest.approx(0.1 * 20 + 0.9 * 1000, rel=0.01)


def test_the_margin_is_scale_times_the_standard_deviation() -> None:
    lengths = record_all(1024, [(300, [(100, True), (300, True)] * 100)])
    for scale in (0.0, 0.25, 1.0):
        forecast = fit_forecast(lengths, ints(), 300, 1024, scale)
        assert distinct_expected(forecast, 0, 2048) == {100 + scale * 100, 300 + scale * 100}
        assert distinct_expected(forecast, 150, 2048) == {300}
        assert distinct_expected(forecast, 0, 250) == {100 + scale * 100, 250}


def test_the_margin_stays_exact_at_lengths_that_few_sequences_reach() -> None:
    # One bucket of lengths: of its 3,200 tokens, 3/4 are the last of their sequence.
    forecast = fit_forecast(record_all(4096, [(800, [(1, True)] * 2400 + [(800, False)])]), ints(), 800, 1, 1.0)
    margin, left = ceil(sqrt(1 / 4) * 4 / 3), 4 / 3
    for num_generated in (0, 20, 40, 70):
        assert mean_expected(forecast, num_generated, 5000) == pytest.approx(num_generated + left + margin, abs=0.05)
    # A length that no sequence is expected to reach: one that does reach it is assumed to continue.
    assert distinct_expected(forecast, 100, 5000) == {5000}


def test_a_step_with_forgotten_ends_lies_outside_the_window() -> None:
    # Of the 8 ends in step 10, 4 are forgotten, so the window begins after that step.
    lengths = record_all(8, [(10, [(10, True)] * 8), (14, [(30, True)] * 4)])
    forecast = fit_forecast(lengths, ints(), 14, 1024, 0.0)
    assert lengths.window_start == 10
    assert distinct_expected(forecast, 0, 1000) == {30}
    assert distinct_expected(forecast, 27, 1000) == {30}


@pytest.mark.parametrize(
    ("share", "num_generated", "max_new_tokens", "expected"),
    [
        (0.3, 0, 1000, 300),
        (0.4, 399, 1000, 400),
        (0.4, 400, 1000, 1000),
        (0.3, 0, 1, 1),
        (0.3, 0, 4, 2),
        (1.0, 7, 1000, 1000),
        (0.0, 0, 1000, 1000),
    ],
)
def test_a_share_forecast_expects_that_share_of_max_new_tokens(
    share: float, num_generated: int, max_new_tokens: int, expected: int
) -> None:
    assert distinct_expected(ShareForecast(share), num_generated, max_new_tokens) == {expected}


DRAW: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "geometric": lambda rng, n: rng.geometric(1 / 120, n),
    "lognormal": lambda rng, n: np.ceil(rng.lognormal(4.3, 0.8, n)).astype(np.int64),
    "two_kinds": lambda rng, n: np.where(rng.random(n) < 0.7, rng.integers(10, 40, n), rng.integers(250, 350, n)),
}
MAX_NEW_TOKENS = 400
SCALE = 0.25


class Population:
    """4,000 sequences that decode at once, all from step 0; each is replaced by a new one when it ends."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.draw = DRAW[kind]
        self.lengths = CompletionLengths(2048)
        self.age = np.zeros(4000, np.int64)
        self.length = self.draw(self.rng, 4000)
        self.step = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.age += 1
            (ended,) = np.nonzero(self.age >= np.minimum(self.length, MAX_NEW_TOKENS))
            self.lengths.record(self.age[ended], self.length[ended] <= MAX_NEW_TOKENS, self.step)
            self.age[ended] = 0
            self.length[ended] = self.draw(self.rng, len(ended))

    def forecast(self) -> SurvivalForecast:
        return fit_forecast(self.lengths, self.age, self.step, 1024, SCALE)

    def true_expected(self, num_generated: int) -> float:
        lengths = self.draw(np.random.default_rng(99), 200_000)
        lengths = np.minimum(lengths[lengths > num_generated], MAX_NEW_TOKENS)
        return float(np.minimum(lengths + ceil(SCALE * lengths.std()), MAX_NEW_TOKENS).mean())


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("seed", range(3))
def test_forecast_is_right_at_every_length_once_the_buffer_is_full(kind: str, seed: int) -> None:
    population = Population(kind, seed)
    population.run(600)
    assert population.lengths.num_recorded > 8 * 2048
    forecast = population.forecast()
    for num_generated in (0, 5, 30, 60, 120, 200, 300, 340):
        found = mean_expected(forecast, num_generated, MAX_NEW_TOKENS)
        left = population.true_expected(num_generated) - num_generated
        assert found - num_generated == pytest.approx(left, rel=0.10, abs=3), num_generated
    assert mean_expected(forecast, 0, MAX_NEW_TOKENS) == pytest.approx(population.true_expected(0), rel=0.05)


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("num_steps", [20, 50, 100, 150])
def test_a_cold_start_does_not_take_the_first_lengths_as_typical(kind: str, num_steps: int) -> None:
    population = Population(kind, seed=5)
    population.run(num_steps)
    first = population.lengths.num_tokens
    truth = population.true_expected(0)
    assert len(first) > 16
    assert first.mean() < 0.75 * truth  # a plain average over ended sequences would be this low
    assert mean_expected(population.forecast(), 0, MAX_NEW_TOKENS) > 0.95 * truth


def test_forecast_follows_a_change_of_the_lengths() -> None:
    population = Population("geometric", seed=1)
    population.run(400)
    population.draw = lambda rng, n: rng.geometric(1 / 20, n)
    population.run(400)
    assert mean_expected(population.forecast(), 0, MAX_NEW_TOKENS) == pytest.approx(20 + ceil(SCALE * 20), rel=0.1)
    population.draw = DRAW["geometric"]
    population.run(400)
    assert mean_expected(population.forecast(), 0, MAX_NEW_TOKENS) == pytest.approx(
        population.true_expected(0), rel=0.1
    )
