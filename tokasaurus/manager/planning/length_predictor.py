"""Length predictor: how many tokens a completion will have, learned from recently finished sequences.

Lengths count sampled tokens and are at least 1. A forecast is conditional on the tokens a sequence has sampled so far.

Finished sequences alone would bias the estimate: the first to finish are the shortest. So running sequences count too,
as sequences that have not ended yet, and every sequence counts only for the tokens it sampled within the window of
steps that the remembered ends cover. This is the product-limit estimate of a survival function from data truncated on
the left and censored on the right. Source: Kaplan and Meier, J. Amer. Statist. Assoc. 53 (1958), 457-481.
"""

from dataclasses import dataclass
from math import ceil, exp
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CERTAIN_HAZARD = 32.0
"""Hazard of a token at which every known sequence ended. It is finite: one in 80 trillion sequences continues, too few
to matter in a sum, but lengths after this token can still be compared."""

MAX_HAZARD = 128.0
"""Largest cumulative hazard at which lengths are told apart: after four certain ends, nothing is known."""

HAZARD_RESOLUTION = 256
"""Table entries per unit of cumulative hazard: a length is off by at most 1 / 256 of the sequences that reach it."""

UNKNOWN = np.iinfo(np.int32).max
"""Longer than any completion."""

GOLDEN_RATIO = 0.6180339887498949
"""Fractional parts of its consecutive multiples are spread evenly, however many are taken."""

ROUNDING_SLACK = 0.01
"""Tokens by which an expected length may exceed a whole number and still be rounded down to it."""


class CompletionLengths:
    """The ends of the last `buffer_size` finished sequences."""

    def __init__(self, buffer_size: int) -> None:
        self._num_tokens = np.zeros(buffer_size, np.int64)
        self._stopped = np.zeros(buffer_size, np.bool_)
        self._steps = np.zeros(buffer_size, np.int64)
        self._num_recorded = 0
        self._window_start: int | None = None

    @property
    def num_recorded(self) -> int:
        """Ends ever recorded, including forgotten ones."""
        return self._num_recorded

    @property
    def window_start(self) -> int | None:
        """The step after which every end is remembered; None while no end has been forgotten."""
        return self._window_start

    @property
    def num_tokens(self) -> Ints:
        """Length of each remembered completion, in tokens, in no particular order."""
        return self._num_tokens[: self._num_recorded]

    @property
    def stopped(self) -> NDArray[np.bool_]:
        """Which of `num_tokens` ended by themselves instead of being cut off."""
        return self._stopped[: self._num_recorded]

    @property
    def steps(self) -> Ints:
        """The step in which each of `num_tokens` ended."""
        return self._steps[: self._num_recorded]

    def record(self, num_tokens: Ints, stopped: NDArray[np.bool_], step: int) -> None:
        """Record sequences that ended in `step`; steps must not decrease between calls.

        num_tokens: tokens that each sampled, at least 1. stopped: whether it ended by itself, as at an eos or a stop
        string; False if it was cut off, as by max_tokens.
        """
        size = len(self._steps)
        num_done = 0
        while num_done < len(num_tokens):  # more than once only when the ring buffer wraps
            start = self._num_recorded % size
            count = min(len(num_tokens) - num_done, size - start)
            end = start + count
            if self._num_recorded >= size:
                self._window_start = int(self._steps[end - 1])
            self._num_tokens[start:end] = num_tokens[num_done : num_done + count]
            self._stopped[start:end] = stopped[num_done : num_done + count]
            self._steps[start:end] = step
            self._num_recorded += count
            num_done += count


class Forecast(Protocol):
    def expected(self, num_generated: Ints, max_new_tokens: Ints, ranks: Ints) -> Ints:
        """Expected final length of each completion, [N] tokens, including a safety margin.

        num_generated: [N] tokens that each has already. The result is greater and at most max_new_tokens.
        ranks: [N] a number of each sequence, the same in every call; sequences are numbered consecutively.
        """
        ...


@dataclass(frozen=True)
class ShareForecast:
    """Every completion is expected to use the same share of its max_new_tokens, or all of it once past that share."""

    share: float

    def expected(self, num_generated: Ints, max_new_tokens: Ints, ranks: Ints) -> Ints:
        """See Forecast."""
        del ranks  # the same share for all
        num_tokens = np.ceil(max_new_tokens * self.share - ROUNDING_SLACK).astype(np.int64)
        return np.where(num_tokens > num_generated, num_tokens, max_new_tokens)


@dataclass(frozen=True)
class SurvivalForecast:
    """How long sequences become, given the tokens that they have sampled so far. Made by `fit_forecast`.

    If every sequence were expected to end at the mean, none would end for a long time, and then all at once. So
    expected lengths are spread over the distribution by rank: their mean is that mean, and among many sequences
    the right number ends in each future step.
    """

    hazards: Floats
    """[K + 1], cumulative hazard: -log of the share of completions with more than l tokens, for l = 0 to K, the longest
    seen; at most MAX_HAZARD."""
    lengths: Ints
    """Entry i: smallest l whose hazard reaches (i + 1) / HAZARD_RESOLUTION, up to the last hazard; the last entry is
    UNKNOWN, since no length reaches it."""
    margins: Ints
    """[K + 1], tokens to add after l tokens: the standard deviation of the remaining tokens times std_buffer_scale."""

    def expected(self, num_generated: Ints, max_new_tokens: Ints, ranks: Ints) -> Ints:
        """See Forecast. A sequence longer than any seen, or whose rank makes it outlast all of them, is expected to use
        max_new_tokens."""
        start = np.minimum(num_generated, len(self.hazards) - 1)
        # -log of the share of sequences that outlast a sequence is the hazard that it survives from here on.
        hazard = np.log(outlasting_shares(ranks))
        np.subtract(self.hazards.take(start), hazard, out=hazard)
        hazard *= HAZARD_RESOLUTION
        indices = np.minimum(hazard, len(self.lengths) - 1).astype(np.int64)
        num_tokens: Ints = self.lengths.take(indices)
        num_tokens += self.margins.take(start)
        return np.minimum(num_tokens, max_new_tokens)


def outlasting_shares(ranks: Ints) -> Floats:
    """Share of sequences expected to outlast the sequence of each rank: above 0, at most 1, spread evenly over any
    number of consecutive ranks."""
    multiples = (ranks + 0.5) * GOLDEN_RATIO
    shares: Floats = np.floor(multiples)
    shares -= multiples
    shares += 1
    return shares


def fit_forecast(
    lengths: CompletionLengths, running: Ints, step: int, num_prediction_buckets: int, std_buffer_scale: float
) -> SurvivalForecast:
    """Fit a forecast to finished sequences and to the sequences running now.

    running: tokens that each running sequence has sampled. step: newest step whose results are in `lengths` and
    `running`. num_prediction_buckets: most classes of equal width into which lengths are divided. Within a class, the
    probability of ending at the next token is constant: ends per sampled token. It is 0 in a class in which no token
    was sampled: a sequence that gets there is expected to continue.

    Each sequence is assumed to sample one token per step; if it waited in between, slightly fewer of its tokens count
    than could.
    """
    ended, stopped = lengths.num_tokens, lengths.stopped
    now = np.concatenate((ended, running))
    before = np.zeros_like(now)  # tokens that each sequence had when the window began
    if lengths.window_start is not None:
        ended_steps = lengths.steps
        before[: len(ended)] = ended - (ended_steps - lengths.window_start)
        before[len(ended) :] = running - (step - lengths.window_start)
        np.maximum(before, 0, out=before)
        stopped = stopped & (ended_steps > lengths.window_start)
    num_known = int(now.max(initial=1))
    starts = np.bincount(before, minlength=num_known + 1)
    starts -= np.bincount(now, minlength=num_known + 1)
    num_sampled = starts.cumsum()[:-1]
    num_ended = np.bincount(ended[stopped] - 1, minlength=num_known)

    width = ceil(num_known / num_prediction_buckets)
    if width > 1:
        edges = np.arange(0, num_known, width)
        num_sampled = np.add.reduceat(num_sampled, edges)
        num_ended = np.add.reduceat(num_ended, edges)
    goes_on = 1 - num_ended / np.maximum(num_sampled, 1)
    hazard = -np.log(np.maximum(goes_on, exp(-CERTAIN_HAZARD)))
    if width > 1:
        hazard = hazard.repeat(width)[:num_known]
    return _forecast_from(hazard, std_buffer_scale)


def _forecast_from(hazard: Floats, std_buffer_scale: float) -> SurvivalForecast:
    """hazard[l]: -log of the share of completions with more than l + 1 tokens among those with more than l."""
    hazards = np.zeros(len(hazard) + 1)
    np.cumsum(hazard, out=hazards[1:])
    np.minimum(hazards, MAX_HAZARD, out=hazards)
    # Hazards never fall, so the smallest l that reaches a value is the number of hazards below it.
    lengths = np.bincount((hazards * HAZARD_RESOLUTION).astype(np.int64)).cumsum()
    lengths[-1] = UNKNOWN

    # Of the sequences that continue after token l, a share survival[l + k] / survival[l] samples token l + k + 1. So
    # the sum of these shares over k >= 0 is the mean, and with weights 2 k + 1 = (k + 1)^2 - k^2 it is the mean square.
    # Sums run from the longest length to the shortest: each is then as exact as the survival it is divided by, however
    # small that is.
    survival = np.exp(-hazards)
    mean = np.zeros(len(survival))
    np.cumsum(survival[-2::-1], out=mean[-2::-1])
    square = mean[::-1].cumsum()[::-1]
    square *= 2
    square -= mean
    mean /= survival
    square /= survival
    std = np.sqrt(np.maximum(square - mean * mean, 0))
    margins = np.ceil(std * std_buffer_scale - ROUNDING_SLACK).astype(np.int64)
    return SurvivalForecast(hazards, lengths, margins)
