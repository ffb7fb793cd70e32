"""Expected completion lengths against a count by hand, and against populations whose true lengths are known."""

from collections.abc import Callable
from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokasaurus.manager.early_stopping import (
    CompletionLengths,
    Forecast,
    Ints,
    SurvivalForecast,
    fit_forecast,
    prior_forecast,
)

Batch = tuple[int, list[tuple[int, bool]]]  # step, and of each that ended in it (tokens, stopped by itself)

ends = st.tuples(st.integers(1, 24), st.booleans())
batches = st.lists(st.tuples(st.integers(0, 6), st.lists(ends, max_size=5)), max_size=8)  # steps since the one before


def at_steps(gaps: list[tuple[int, list[tuple[int, bool]]]]) -> list[Batch]:
    step, result = 0, []
    for gap, ended in gaps:
        step += gap
        result.append((step, ended))
    return result


def record_all(buffer_size: int, history: list[Batch]) -> CompletionLengths:
    lengths = CompletionLengths(buffer_size)
    for step, ended in history:
        lengths.record(np.array([n for n, _ in ended], np.int64), np.array([s for _, s in ended], np.bool_), step)
    return lengths


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def of_one(forecast: Forecast, num_generated: int, max_new_tokens: int) -> int:
    return int(forecast.expected(ints(num_generated), ints(max_new_tokens))[0])


def chances_to_end(
    history: list[Batch], buffer_size: int, running: list[int], step: int, num_buckets: int
) -> list[float]:
    """Token by token and sequence by sequence: the chance that token 1, 2, ... is the last if it is sampled."""
    everything = [(num, stopped, at) for at, ended in history for num, stopped in ended]
    remembered = everything[-buffer_size:]
    forgotten = everything[:-buffer_size]
    window_start = forgotten[-1][2] if forgotten else -(10**9)
    longest = max([1, *(num for num, _, _ in remembered), *running])
    width = ceil(longest / num_buckets)
    num_sampled, num_ended = [0] * (longest // width + 1), [0] * (longest // width + 1)
    for num_tokens, stopped, at in remembered + [(num, False, step) for num in running]:
        for token in range(1, num_tokens + 1):
            if at - (num_tokens - token) > window_start:
                num_sampled[(token - 1) // width] += 1
                num_ended[(token - 1) // width] += stopped and token == num_tokens
    chances = [ended / sampled if sampled else 0.0 for ended, sampled in zip(num_ended, num_sampled, strict=True)]
    return [chances[(token - 1) // width] for token in range(1, longest + 1)]


def expected_by_hand(chances: list[float], num_generated: int, max_new_tokens: int, scale: float) -> float:
    """Mean and standard deviation over every possible length, each with its probability. Not yet rounded."""
    alive, probabilities = 1.0, []
    for token in range(num_generated + 1, max_new_tokens + 1):
        chance = 1.0 if token == max_new_tokens else chances[token - 1] if token <= len(chances) else 0.0
        probabilities.append((token, alive * chance))
        alive *= 1 - chance
    mean = sum(token * probability for token, probability in probabilities)
    return mean + scale * sqrt(sum((token - mean) ** 2 * probability for token, probability in probabilities))


@settings(max_examples=2000, deadline=None)
@given(
    gaps=batches,
    buffer_size=st.integers(1, 15),
    running=st.lists(st.integers(0, 30), max_size=6),
    steps_since=st.integers(0, 5),
    num_buckets=st.integers(1, 40),
    scale=st.sampled_from([0.0, 0.25, 1.0]),
    asked=st.lists(st.tuples(st.integers(0, 35), st.integers(1, 40)), min_size=1, max_size=8),
)
def test_expected_length_is_that_of_counting_every_token_and_length(
    gaps: list[tuple[int, list[tuple[int, bool]]]],
    buffer_size: int,
    running: list[int],
    steps_since: int,
    num_buckets: int,
    scale: float,
    asked: list[tuple[int, int]],
) -> None:
    history = at_steps(gaps)
    step = (history[-1][0] if history else 0) + steps_since
    lengths = record_all(buffer_size, history)
    forecast = fit_forecast(lengths, ints(*running), step, num_buckets, scale)
    chances = chances_to_end(history, buffer_size, running, step, num_buckets)
    num_generated = ints(*(num for num, _ in asked))
    max_new_tokens = num_generated + ints(*(room for _, room in asked))
    found = forecast.expected(num_generated, max_new_tokens)
    for have, most, value in zip(num_generated, max_new_tokens, found, strict=True):
        exact = expected_by_hand(chances, int(have), int(most), scale)
        assert have < value <= most
        # Rounded up, but for a hundredth of a token; where that is close to a whole number either one is right.
        allowed = {min(max(ceil(exact - slack), have + 1), most) for slack in (0.0099, 0.0101)}
        assert value in allowed, (have, most, exact)


@settings(max_examples=1000, deadline=None)
@given(gaps=batches, buffer_size=st.integers(1, 12))
def test_the_last_ends_are_remembered_and_all_after_the_window_start(
    gaps: list[tuple[int, list[tuple[int, bool]]]], buffer_size: int
) -> None:
    history = at_steps(gaps)
    lengths = record_all(buffer_size, history)
    everything = [(num, stopped, step) for step, ended in history for num, stopped in ended]
    remembered = list(zip(lengths.num_tokens.tolist(), lengths.stopped.tolist(), lengths.steps.tolist(), strict=True))
    assert sorted(remembered) == sorted(everything[-buffer_size:])
    assert lengths.num_recorded == len(everything)
    if len(everything) <= buffer_size:
        assert lengths.window_start is None
    else:
        assert lengths.window_start == everything[-buffer_size - 1][2]


def test_with_nothing_known_every_completion_is_as_long_as_it_may() -> None:
    forecast = fit_forecast(CompletionLengths(16), ints(), 0, 1024, 0.25)
    assert forecast.expected(ints(0, 7, 99), ints(100, 8, 100_000)).tolist() == [100, 8, 100_000]


def test_a_sequence_longer_than_all_that_were_seen_goes_on_to_its_end() -> None:
    lengths = record_all(64, [(100, [(100, True)] * 50)])
    forecast = fit_forecast(lengths, ints(), 100, 1024, 0.25)
    assert forecast.expected(ints(0, 99, 100, 500), ints(2048, 2048, 2048, 2048)).tolist() == [100, 100, 2048, 2048]


def test_sequences_cut_off_by_max_tokens_say_only_that_they_would_have_gone_on() -> None:
    cut = record_all(1024, [(100, [(50, False)] * 500), (200, [(100, True)] * 500)])
    assert of_one(fit_forecast(cut, ints(), 200, 1024, 0.25), 0, 1000) == 100
    stopped = record_all(1024, [(100, [(50, True)] * 500), (200, [(100, True)] * 500)])
    assert of_one(fit_forecast(stopped, ints(), 200, 1024, 0.25), 0, 1000) == ceil(75 + 0.25 * 25)


def test_running_sequences_keep_the_first_to_finish_from_setting_the_length() -> None:
    lengths = record_all(1024, [(20, [(20, True)] * 100)])
    alone = fit_forecast(lengths, ints(), 20, 1024, 0.0)
    among_others = fit_forecast(lengths, np.full(900, 20), 20, 1024, 0.0)
    assert of_one(alone, 0, 1000) == 20
    assert of_one(among_others, 0, 1000) == 0.1 * 20 + 0.9 * 1000


def test_a_margin_is_part_of_the_standard_deviation() -> None:
    lengths = record_all(1024, [(300, [(100, True), (300, True)] * 100)])
    for scale in (0.0, 0.25, 1.0):
        assert of_one(fit_forecast(lengths, ints(), 300, 1024, scale), 0, 2048) == 200 + scale * 100
        assert of_one(fit_forecast(lengths, ints(), 300, 1024, scale), 150, 2048) == 300
        assert of_one(fit_forecast(lengths, ints(), 300, 1024, scale), 0, 200) == ceil(150 + scale * 50)


def test_a_tail_of_almost_no_probability_is_forecast_as_exactly_as_the_rest() -> None:
    # One class of lengths, in which each of 3,200 tokens ends a sequence with probability 3/4.
    lengths = record_all(4096, [(800, [(1, True)] * 2400 + [(800, False)])])
    forecast = fit_forecast(lengths, ints(), 800, 1, 1.0)
    assert forecast.survival[400] < 1e-240
    left = ceil(4 / 3 + sqrt(1 / 4) * 4 / 3)
    assert forecast.expected(ints(0, 200, 400), ints(5000, 5000, 5000)).tolist() == [left, 200 + left, 400 + left]
    # So far out that the probability cannot even be represented, a sequence is assumed to go on.
    assert of_one(forecast, 790, 5000) == 5000


def test_ends_beyond_what_is_remembered_do_not_count_twice_or_in_part() -> None:
    # Of the 8 that ended in step 10, 4 are forgotten: the window begins after that step.
    lengths = record_all(8, [(10, [(10, True)] * 8), (14, [(30, True)] * 4)])
    forecast = fit_forecast(lengths, ints(), 14, 1024, 0.0)
    assert lengths.window_start == 10
    assert of_one(forecast, 0, 1000) == 30
    assert of_one(forecast, 27, 1000) == 30


@pytest.mark.parametrize(
    ("mean", "std", "scale", "num_generated", "max_new_tokens", "expected"),
    [
        (0.3, 0.0, 0.25, 0, 1000, 300),
        (0.3, 0.4, 0.25, 0, 1000, 400),
        (0.3, 0.4, 0.25, 399, 1000, 400),
        (0.3, 0.4, 0.25, 400, 1000, 1000),
        (0.3, 0.0, 0.25, 0, 1, 1),
        (0.3, 0.0, 0.25, 0, 4, 2),
        (0.9, 4.0, 0.25, 0, 1000, 1000),
        (1.0, 0.0, 0.25, 7, 1000, 1000),
        (0.0, 0.0, 0.25, 0, 1000, 1000),
    ],
)
def test_prior_forecast_is_a_share_of_max_new_tokens(
    mean: float, std: float, scale: float, num_generated: int, max_new_tokens: int, expected: int
) -> None:
    assert of_one(prior_forecast(mean, std, scale), num_generated, max_new_tokens) == expected


DRAW: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "geometric": lambda rng, n: rng.geometric(1 / 120, n),
    "lognormal": lambda rng, n: np.ceil(rng.lognormal(4.3, 0.8, n)).astype(np.int64),
    "two_kinds": lambda rng, n: np.where(rng.random(n) < 0.7, rng.integers(10, 40, n), rng.integers(250, 350, n)),
}
MAX_NEW_TOKENS = 400
SCALE = 0.25


class Population:
    """4,000 sequences that all decode, each replaced by a new one when it ends; all began at step 0."""

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
        return float(lengths.mean() + SCALE * lengths.std())


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("seed", range(3))
def test_forecast_is_right_at_every_length_once_the_buffer_is_full(kind: str, seed: int) -> None:
    population = Population(kind, seed)
    population.run(600)
    assert population.lengths.num_recorded > 8 * 2048
    forecast = population.forecast()
    for num_generated in (0, 5, 30, 60, 120, 200, 300, 340):
        found = of_one(forecast, num_generated, MAX_NEW_TOKENS)
        left = population.true_expected(num_generated) - num_generated
        assert found - num_generated == pytest.approx(left, rel=0.10, abs=3), num_generated
    assert of_one(forecast, 0, MAX_NEW_TOKENS) == pytest.approx(population.true_expected(0), rel=0.05)


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("num_steps", [20, 50, 100, 150])
def test_a_cold_start_does_not_mistake_the_first_lengths_for_all(kind: str, num_steps: int) -> None:
    population = Population(kind, seed=5)
    population.run(num_steps)
    first = population.lengths.num_tokens
    truth = population.true_expected(0)
    assert len(first) > 16
    assert first.mean() < 0.75 * truth  # which is what an average of the finished ones would say
    assert of_one(population.forecast(), 0, MAX_NEW_TOKENS) > 0.95 * truth


def test_forecast_follows_a_change_of_the_lengths() -> None:
    population = Population("geometric", seed=1)
    population.run(400)
    population.draw = lambda rng, n: rng.geometric(1 / 20, n)
    population.run(400)
    assert of_one(population.forecast(), 0, MAX_NEW_TOKENS) == pytest.approx(20 + SCALE * 20, rel=0.1)
    population.draw = DRAW["geometric"]
    population.run(400)
    assert of_one(population.forecast(), 0, MAX_NEW_TOKENS) == pytest.approx(population.true_expected(0), rel=0.1)
