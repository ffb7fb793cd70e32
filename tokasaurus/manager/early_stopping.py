"""How many tokens a completion will have, learnt from the sequences that finished lately.

Lengths count sampled tokens, from 1. A forecast is for a sequence that has come as far as it has: half of a long answer
makes a short one impossible.

Finished sequences alone would mislead: the first to finish are the shortest. So the running ones count as well, as
sequences that have not ended yet, and every sequence counts only for the tokens it sampled within the window of steps
that the remembered ends cover. This is the product-limit estimate of a survival function from data truncated on the
left and censored on the right. Source: Kaplan and Meier, J. Amer. Statist. Assoc. 53 (1958), 457-481.
"""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_SHARE_THAT_GOES_ON = 1e-15
"""Where every sequence known has ended, this share of them goes on all the same: too few to matter in a sum, but a
sequence that did go on can be compared with the others that did."""

LEAST_SURVIVAL = 1e-290
"""Survival falls no further, so that quotients of two of them stay finite."""

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
    def expected(self, num_generated: Ints, max_new_tokens: Ints) -> Ints:
        """Tokens [N] that each of N completions is expected to have in the end, a safety margin included.

        num_generated: tokens [N] that each has already. The result is above it and at most max_new_tokens.
        """
        ...


@dataclass(frozen=True)
class ShareForecast:
    """Every completion uses the same share of its max_new_tokens; one that is past it, all of them."""

    share: float

    def expected(self, num_generated: Ints, max_new_tokens: Ints) -> Ints:
        """As Forecast says."""
        num_tokens = np.ceil(max_new_tokens * self.share - ROUNDING_SLACK).astype(np.int64)
        return np.where(num_tokens > num_generated, num_tokens, max_new_tokens)


@dataclass(frozen=True)
class SurvivalForecast:
    """Mean and standard deviation of what is left to sample, by how far a sequence is. Made by `fit_forecast`.

    Each table has an entry for every number l of tokens that a sequence can have already, from 0 to K, the longest ever
    seen; whoever gets beyond K goes on to max_new_tokens. `survival`: the share of all completions that have more than
    l tokens. Of such a completion, if it is cut off at K, `mean_left` and `mean_square_left` are the expected number of
    tokens after l, and of its square.
    """

    survival: Floats
    mean_left: Floats
    mean_square_left: Floats
    std_buffer_scale: float

    def expected(self, num_generated: Ints, max_new_tokens: Ints) -> Ints:
        """As Forecast says; the margin is std_buffer_scale standard deviations."""
        num_known = len(self.survival) - 1
        start = np.minimum(num_generated, num_known)
        end = np.minimum(max_new_tokens, num_known)
        most_left = max_new_tokens - num_generated
        within = end - start
        # The tables cut completions off at K. Of those that reach `end`, take off what comes after it, or add what they
        # have beyond K: `added` tokens to `within` of them, which makes (within + added)^2 - within^2 of the square.
        share = self.survival.take(end)
        share /= self.survival.take(start)
        beyond = most_left - within
        added = beyond - self.mean_left.take(end)
        added_square = within * added
        added_square *= 2
        added_square += np.square(beyond, dtype=np.float64)
        added_square -= self.mean_square_left.take(end)
        mean = self.mean_left.take(start)
        added *= share
        mean += added
        variance = self.mean_square_left.take(start)
        added_square *= share
        variance += added_square
        variance -= mean * mean
        np.maximum(variance, 0, out=variance)
        margin = np.sqrt(variance, out=variance)
        margin *= self.std_buffer_scale
        mean += margin
        mean -= ROUNDING_SLACK
        left = np.ceil(mean, out=mean).astype(np.int64)
        np.minimum(left, most_left, out=left)
        left += num_generated
        return left


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
    np.maximum(goes_on, LEAST_SHARE_THAT_GOES_ON, out=goes_on)
    if width > 1:
        goes_on = goes_on.repeat(width)[:num_known]
    return _forecast_from(goes_on, std_buffer_scale)


def _forecast_from(goes_on: Floats, std_buffer_scale: float) -> SurvivalForecast:
    """goes_on[l]: of the completions of more than l tokens, the share that have more than l + 1.

    Sums run from the longest to the shortest: each is then as exact as the survival that it is divided by, however
    small that is.
    """
    num_entries = len(goes_on) + 1
    survival = np.empty(num_entries)
    survival[0] = 1
    np.cumprod(goes_on, out=survival[1:])
    np.maximum(survival, LEAST_SURVIVAL, out=survival)

    # Of those that go on after token l, a share survival[l + k] / survival[l] samples token l + k + 1. So these shares
    # for k from 0 sum up to the mean, and with the weights 2 k + 1 = (k + 1)^2 - k^2 to the mean square.
    mean = np.zeros(num_entries)
    np.cumsum(survival[-2::-1], out=mean[-2::-1])
    square = np.empty(num_entries)
    np.cumsum(mean[::-1], out=square[::-1])
    square *= 2
    square -= mean
    mean /= survival
    square /= survival
    return SurvivalForecast(survival, mean, square, std_buffer_scale)
