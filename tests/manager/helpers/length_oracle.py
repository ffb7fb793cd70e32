"""A slow oracle for the length predictor: counts completion lengths token by token, sequence by sequence."""

from math import ceil, exp, inf, log, sqrt
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from tokasaurus.manager.planning.length_predictor import (
    CERTAIN_HAZARD,
    MAX_HAZARD,
    CompletionLengths,
    Ints,
    SurvivalForecast,
    fit_forecast,
)

Batch = tuple[int, list[tuple[int, bool]]]  # step, and (tokens, stopped by itself) of each sequence that ended in it

ends = st.tuples(st.integers(1, 24), st.booleans())
batches = st.lists(
    st.tuples(st.integers(0, 6), st.lists(ends, max_size=5)), max_size=8
)  # steps since the previous batch


def with_step_numbers(gaps: list[tuple[int, list[tuple[int, bool]]]]) -> list[Batch]:
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


def chances_to_end(
    history: list[Batch], buffer_size: int, running: list[int], step: int, num_prediction_buckets: int
) -> list[float]:
    """The probability that token 1, 2, ... is the last one, given that it is sampled."""
    everything = [(num, stopped, at) for at, ended in history for num, stopped in ended]
    remembered = everything[-buffer_size:]
    forgotten = everything[:-buffer_size]
    window_start = forgotten[-1][2] if forgotten else -(10**9)
    longest = max([1, *(num for num, _, _ in remembered), *running])
    width = ceil(longest / num_prediction_buckets)
    num_sampled, num_ended = [0] * (longest // width + 1), [0] * (longest // width + 1)
    for num_tokens, stopped, at in remembered + [(num, False, step) for num in running]:
        for token in range(1, num_tokens + 1):
            if at - (num_tokens - token) > window_start:
                num_sampled[(token - 1) // width] += 1
                num_ended[(token - 1) // width] += stopped and token == num_tokens
    chances = [ended / sampled if sampled else 0.0 for ended, sampled in zip(num_ended, num_sampled, strict=True)]
    return [chances[(token - 1) // width] for token in range(1, longest + 1)]


class LengthOracle:
    """The length distribution that `chances` give for sequences with `num_generated` tokens, length by length."""

    def __init__(self, chances: list[float], num_generated: int) -> None:
        hazards = [0.0]
        for chance in chances:
            hazard = CERTAIN_HAZARD if chance == 1.0 else -log(1 - chance)
            hazards.append(min(hazards[-1] + hazard, MAX_HAZARD))
        self.longest = len(chances)
        self.have = num_generated
        self.hazards = [hazard - hazards[min(num_generated, self.longest)] for hazard in hazards]

    def share_longer(self, length: int) -> float:
        """Share of sequences longer than `length` (>= num_generated). No end is known past the longest length."""
        return exp(-self.hazards[min(length, self.longest)])

    def min_length(self, hazard: float) -> float:
        """The smallest length that at most a share exp(-hazard) exceed; infinite if no end is known that late."""
        lengths = range(self.have + 1, self.longest + 1)
        return next((length for length in lengths if self.hazards[length] >= hazard), inf)

    def mean(self, max_new_tokens: int) -> float:
        """Mean length, if no sequence exceeds max_new_tokens."""
        return self.have + sum(self.share_longer(length) for length in range(self.have, max_new_tokens))

    def std(self) -> float:
        """Standard deviation of the length, if no sequence exceeds the longest length seen."""
        chances = {max(self.have, self.longest): self.share_longer(self.longest - 1) if self.have < self.longest else 1}
        for length in range(self.have + 1, self.longest):
            chances[length] = self.share_longer(length - 1) - self.share_longer(length)
        mean = sum(length * chance for length, chance in chances.items())
        return sqrt(sum((length - mean) ** 2 * chance for length, chance in chances.items()))


class Situation(NamedTuple):
    """One set of ended and running sequences: the input of fit_forecast, and `chances` as counted by the oracle."""

    lengths: CompletionLengths
    running: list[int]
    step: int
    num_prediction_buckets: int
    chances: list[float]

    def forecast(self, scale: float) -> SurvivalForecast:
        return fit_forecast(self.lengths, ints(*self.running), self.step, self.num_prediction_buckets, scale)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    history, buffer_size = with_step_numbers(draw(batches)), draw(st.integers(1, 15))
    running, num_prediction_buckets = draw(st.lists(st.integers(0, 30), max_size=6)), draw(st.integers(1, 40))
    step = (history[-1][0] if history else 0) + draw(st.integers(0, 5))
    chances = chances_to_end(history, buffer_size, running, step, num_prediction_buckets)
    return Situation(record_all(buffer_size, history), running, step, num_prediction_buckets, chances)
