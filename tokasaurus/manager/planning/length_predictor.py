"""How many tokens a completion will have, learnt from the sequences that finished lately.

Lengths count sampled tokens, from 1. A forecast is for a sequence that has come as far as it has: half of a long answer
makes a short one impossible.

Finished sequences alone would mislead: the first to finish are the shortest. So the running ones count as well, as
sequences that have not ended yet, and every sequence counts only for the tokens it sampled within the window of steps
that the remembered ends cover. This is the product-limit estimate of a survival function from data truncated on the
left and censored on the right. Source: Kaplan and Meier, J. Amer. Statist. Assoc. 53 (1958), 457-481.
"""

from dataclasses import dataclass
from math import ceil, exp
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CERTAIN_HAZARD = 32.0
"""Hazard of a token with which every sequence known has ended. Of 80 trillion one goes on all the same: too few to
matter in a sum, but a sequence that did go on can be compared with the others that did."""

MOST_HAZARD = 128.0
"""Cumulative hazard up to which lengths are told apart: past four certain ends, nothing is known."""

HAZARD_RESOLUTION = 256
"""Steps to a unit of cumulative hazard: lengths are right to a share of 1 / 256 of the sequences that got as far."""

UNKNOWN = np.iinfo(np.int32).max
"""Longer than any completion."""

GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly, any number of them that follow each other."""

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
        """Ends recorded ever, those forgotten again included."""
        return self._num_recorded

    @property
    def window_start(self) -> int | None:
        """The step after which every end is remembered; None while none has been forgotten."""
        return self._window_start

    @property
    def num_tokens(self) -> Ints:
        """Length of each completion remembered, in no particular order."""
        return self._num_tokens[: self._num_recorded]

    @property
    def stopped(self) -> NDArray[np.bool_]:
        """Which of `num_tokens` ended by themselves."""
        return self._stopped[: self._num_recorded]

    @property
    def steps(self) -> Ints:
        """The step in which each of `num_tokens` ended."""
        return self._steps[: self._num_recorded]

    def record(self, num_tokens: Ints, stopped: NDArray[np.bool_], step: int) -> None:
        """Sequences that ended in `step`, which is never below that of an earlier call.

        num_tokens: sampled by each, at least 1. stopped: ended by an eos or a stop string; False where something else
        cut the sequence off, such as max_tokens.
        """
        size = len(self._steps)
        num_done = 0
        while num_done < len(num_tokens):  # more than once only where the ring begins anew
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
        """Tokens [N] that each of N completions is expected to have in the end, a safety margin included.

        num_generated: tokens [N] that each has already. The result is above it and at most max_new_tokens.
        ranks: a number [N] of each sequence, of numbers that follow each other; the same in every call.
        """
        ...


@dataclass(frozen=True)
class ShareForecast:
    """Every completion uses the same share of its max_new_tokens; one that is past it, all of them."""

    share: float

    def expected(self, num_generated: Ints, max_new_tokens: Ints, ranks: Ints) -> Ints:
        """As Forecast says."""
        del ranks  # all are alike
        num_tokens = np.ceil(max_new_tokens * self.share - ROUNDING_SLACK).astype(np.int64)
        return np.where(num_tokens > num_generated, num_tokens, max_new_tokens)


@dataclass(frozen=True)
class SurvivalForecast:
    """Lengths as they are distributed among sequences that have come as far. Made by `fit_forecast`.

    If every sequence were expected to end at its mean, none would end for a long while, and then all at once: so the
    lengths are spread over the distribution, by rank. Their mean is the expected one, and of many sequences as many end
    in each step to come as will.

    hazards: [K + 1], cumulative: -log of the share of completions with more than l tokens, for l from 0 to K, the
    longest seen; at most MOST_HAZARD.
    lengths: the least l that reaches the hazard (i + 1) / HAZARD_RESOLUTION, for each i up to the place of the last
    hazard; UNKNOWN there, as none does.
    margins: [K + 1], tokens added after l: the standard deviation of those left, times std_buffer_scale.
    """

    hazards: Floats
    lengths: Ints
    margins: Ints

    def expected(self, num_generated: Ints, max_new_tokens: Ints, ranks: Ints) -> Ints:
        """As Forecast says. A sequence that is past all that was seen, or whose rank makes it outlast all that, is
        expected to use max_new_tokens."""
        start = np.minimum(num_generated, len(self.hazards) - 1)
        # -log of the share of sequences that outlast one is the hazard that it lives through from here on.
        hazard = np.log(outlasting_shares(ranks))
        np.subtract(self.hazards.take(start), hazard, out=hazard)
        hazard *= HAZARD_RESOLUTION
        places = np.minimum(hazard, len(self.lengths) - 1).astype(np.int64)
        num_tokens: Ints = self.lengths.take(places)
        num_tokens += self.margins.take(start)
        return np.minimum(num_tokens, max_new_tokens)


def outlasting_shares(ranks: Ints) -> Floats:
    """What share of sequences is expected to outlast the one of each rank: above 0, at most 1, spread evenly over any
    number of ranks that follow each other."""
    engine = (ranks + 0.5) * GOLDEN_RATIO
    shares: Floats = np.floor(engine)
    shares -= engine
    shares += 1
    return shares


def prior_forecast(mean: float, std: float, std_buffer_scale: float) -> Forecast:
    """What to expect before enough sequences have finished. `mean` and `std` are shares of max_new_tokens.

    With mean 1 nothing is predicted: every completion is expected to be as long as it may.
    """
    return ShareForecast(min(1.0, mean + std_buffer_scale * std))


def fit_forecast(
    lengths: CompletionLengths, running: Ints, step: int, num_buckets: int, std_buffer_scale: float
) -> SurvivalForecast:
    """The forecast that `lengths` and the sequences that now run lead to.

    running: tokens sampled so far by each of them. step: the newest whose results are in `lengths` and `running`.
    num_buckets: the lengths seen are cut into at most so many classes of equal width, and the probability to end with
    the next token is the same throughout a class: ends per token sampled. In a class where no token was seen it is 0: a
    sequence that gets there is expected to go on.

    A sequence is taken to have sampled one token per step; where it waited in between, a little less of it is counted
    than could be.
    """
    ended, stopped = lengths.num_tokens, lengths.stopped
    now = np.concatenate((ended, running))
    before = np.zeros_like(now)  # tokens that a sequence had when the window began
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

    width = ceil(num_known / num_buckets)
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
    """hazard[l]: -log of the share that have more than l + 1 tokens, of the completions of more than l."""
    hazards = np.zeros(len(hazard) + 1)
    np.cumsum(hazard, out=hazards[1:])
    np.minimum(hazards, MOST_HAZARD, out=hazards)
    # As hazards never fall, the least l that reaches one is the number of those below it.
    lengths = np.bincount((hazards * HAZARD_RESOLUTION).astype(np.int64)).cumsum()
    lengths[-1] = UNKNOWN

    # Of those that go on after token l, a share survival[l + k] / survival[l] samples token l + k + 1. So these shares
    # for k from 0 sum up to the mean, and with the weights 2 k + 1 = (k + 1)^2 - k^2 to the mean square. Sums run from
    # the longest to the shortest: each is then as exact as the survival that it is divided by, however small that is.
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
