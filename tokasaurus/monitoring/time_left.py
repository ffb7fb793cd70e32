"""How long work still takes: the one model behind every time left that a user sees.

The time of a step grows linearly with its rows and its prompt tokens (StepCost). So what is left costs

    per_step * steps + per_row * tokens to generate + per_prompt_token * prompt tokens to compute,

and what was done lately, counted in the same way, tells how many seconds that takes here and now: beside other work, on
several replicas, or with costs that are a little wrong.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokasaurus.messages.status import StepCost, TimeLeft

MAX_WINDOW_S = 60.0
"""The speed is measured over the last half of the work's time, at most over this time."""
MIN_WINDOW_S = 2.0
_NUM_QUANTILES = 64
_CERTAIN_HAZARD = 32.0
_PRIOR_ENDS = 0.5
"""Weight of the expectation, before any end was seen, that a completion has half of its most tokens."""
_MAX_SIMULATED = 128
"""Slots of the simulation; more are represented by these."""
_WAVES = 4
"""Completions for each slot that are simulated; how many steps those before take follows from their number."""
_MIN_TREND = 5.0
"""Standard errors by which the lengths of two halves of the completions differ that are taken for a trend."""
_MIN_ENDED = 8
"""Completions of the later half that must have ended, and at least a third of it."""
_MAX_TREND = 4.0
"""Most times that the lengths of what has not begun are longer, or shorter, than those of what has."""
_MODEL_ERROR = 0.05
_YOUNG_ERROR = 0.6
"""Relative error of the speed after a second."""
_GOLDEN_RATIO = 0.6180339887498949


class Done(NamedTuple):
    """What was done until a moment. Numbers need not be whole."""

    time_s: float
    """By any clock."""
    num_tokens: float = 0.0
    """Generated."""
    num_steps: float = 0.0
    num_prompt_tokens: float = 0.0
    """Computed."""

    def cost(self, cost: StepCost) -> float:
        return (
            cost.per_step * self.num_steps
            + cost.per_row * self.num_tokens
            + cost.per_prompt_token * self.num_prompt_tokens
        )


@dataclass(slots=True)
class Pace:
    """What was done lately."""

    _history: deque[Done] = field(default_factory=deque)
    _begin_s: float = 0.0

    def note(self, done: Done) -> None:
        """done: since the same begin at each call."""
        if self._history:  # what an engine had done that died is done again
            done = Done(*(max(old, new) for old, new in zip(self._history[-1], done, strict=True)))
        else:
            self._begin_s = done.time_s
        self._history.append(done)
        window_s = max(MIN_WINDOW_S, min(MAX_WINDOW_S, (done.time_s - self._begin_s) / 2))
        while len(self._history) > 2 and done.time_s - self._history[1].time_s >= window_s:
            self._history.popleft()

    def clear(self) -> None:
        """There was nothing to do."""
        self._history.clear()

    @property
    def lately(self) -> Done:
        """What was done in the window; `time_s` is its length."""
        if not self._history:
            return Done(0.0)
        first, last = self._history[0], self._history[-1]
        return Done(*(new - old for old, new in zip(first, last, strict=True)))

    @property
    def age_s(self) -> float:
        """Time since the first note."""
        return self._history[-1].time_s - self._begin_s if self._history else 0.0

    def slowness(self, cost: StepCost) -> float | None:
        """How many times as long as by the costs everything took; None until something was done."""
        lately = self.lately
        expected_s = lately.cost(cost)
        return lately.time_s / expected_s if expected_s > 0 and lately.time_s > 0 else None

    def tokens_per_s(self) -> float | None:
        """None until there is a basis."""
        lately = self.lately
        return lately.num_tokens / lately.time_s if lately.time_s > 0 else None


class Lengths:
    """How long completions become, by ended and running ones.

    The ended ones alone are the shortest. Beyond the longest known, ends are as frequent as they were before it.
    Source: Kaplan and Meier, J. Amer. Statist. Assoc. 53 (1958), 457-481."""

    def __init__(self, ended: Sequence[int], running: Sequence[int], max_tokens: int) -> None:
        """ended, running: tokens of each. max_tokens: most that one may have."""
        self._max_tokens = max_tokens
        self.num_ended = len(ended)
        ends, ages = sorted(ended), sorted(running)
        exposure = sum(ends) + sum(ages) + _PRIOR_ENDS * max_tokens / 2
        self._rate = (len(ends) + _PRIOR_ENDS) / max(1.0, exposure)
        self._lengths: list[int] = []
        self._hazards: list[float] = []
        """Cumulative hazard after each of `_lengths`."""
        index, hazard = 0, 0.0
        while index < len(ends):
            length = ends[index]
            after = bisect_right(ends, length, index)
            at_risk = len(ends) - index + len(ages) - bisect_left(ages, length)
            goes_on = 1 - (after - index) / at_risk
            hazard += min(_CERTAIN_HAZARD, -math.log(goes_on) if goes_on > 0 else _CERTAIN_HAZARD)
            self._lengths.append(length)
            self._hazards.append(hazard)
            index = after

    def final(self, share: float, start: int = 0, max_tokens: int | None = None) -> float:
        """The length that `share` of the completions with `start` tokens outlast. share: above 0, at most 1."""
        most = self._max_tokens if max_tokens is None else max_tokens
        known = bisect_right(self._lengths, start)
        before = self._hazards[known - 1] if known else 0.0
        wanted = before - math.log(share)
        index = bisect_left(self._hazards, wanted, known)
        if index < len(self._lengths):
            return max(start + 1, min(most, self._lengths[index]))
        last = max(start, self._lengths[-1] if self._lengths else 0)
        reached = self._hazards[-1] if self._hazards else 0.0
        return max(start + 1, min(most, last + (wanted - max(before, reached)) / self._rate))

    def mean(self) -> float:
        return sum(self.spread(_NUM_QUANTILES)) / _NUM_QUANTILES

    def deviation(self) -> float:
        """Their standard deviation."""
        mean = self.mean()
        return math.sqrt(sum((length - mean) ** 2 for length in self.spread(_NUM_QUANTILES)) / _NUM_QUANTILES)

    def error(self) -> float:
        """Relative error of the mean."""
        beyond = math.exp(-self._hazards[-1]) if self._hazards else 1.0
        return math.hypot(self.deviation() / self.mean() / math.sqrt(max(1, self.num_ended)), beyond)

    def spread(self, num: int) -> list[float]:
        """`num` lengths, spread evenly over the shares, in an order without a trend."""
        return [self.final(share) for share in outlasting_shares(num)]


def outlasting_shares(num: int) -> list[float]:
    """`num` shares, spread evenly over (0, 1), in an order without a trend."""
    order = sorted(range(num), key=lambda index: index * _GOLDEN_RATIO % 1)
    return [(place + 0.5) / num for place in order]


class Sample(NamedTuple):
    """A completion."""

    number: int
    """In the order of the starts."""
    num_tokens: int
    has_ended: bool


def lengths_to_come(samples: Sequence[Sample], max_tokens: int, number: float) -> tuple[Lengths, float]:
    """(lengths of the completions that have begun, how many times as long those about this number become).

    If the samples have a trend, as of rows that are sorted, the lengths are those of the later half."""
    ordered = sorted(samples)
    parts = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    earlier, later = (_lengths_of(part, max_tokens) for part in parts)
    everyone = _lengths_of(ordered, max_tokens)
    if later.num_ended < max(_MIN_ENDED, len(parts[1]) / 3):
        return everyone, 1.0
    before, now = earlier.mean(), later.mean()
    if abs(now - before) <= _MIN_TREND * math.hypot(before * earlier.error(), now * later.error()):
        return everyone, 1.0
    middles = [part[len(part) // 2].number for part in parts]
    expected = now + (now - before) * (number - middles[1]) / max(1, middles[1] - middles[0])
    return later, min(_MAX_TREND, max(1 / _MAX_TREND, expected / now))


def _lengths_of(samples: Sequence[Sample], max_tokens: int) -> Lengths:
    ended = [sample.num_tokens for sample in samples if sample.has_ended]
    return Lengths(ended, [sample.num_tokens for sample in samples if not sample.has_ended], max_tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """What is left."""

    running: Sequence[float]
    """Tokens that each running completion still gets."""
    num_waiting: float = 0.0
    """Completions that have not begun."""
    waiting: Sequence[float] = ()
    """Lengths like theirs, any number of them."""
    num_at_once: int = 1
    """Completions that run at the same time."""
    num_prompt_tokens: float = 0.0
    """To compute."""
    error: float = 0.0
    """Relative error of the mean length."""
    deviation: float = 0.0
    """Standard deviation of the length of one completion, such as the last one."""

    @property
    def mean_waiting(self) -> float:
        return sum(self.waiting) / len(self.waiting) if self.waiting else 0.0

    @property
    def num_tokens(self) -> float:
        return sum(self.running) + self.num_waiting * self.mean_waiting

    def num_steps(self) -> float:
        """Until the last completion ends: whenever one ends, the next one begins."""
        slots = max(1, self.num_at_once, len(self.running))
        scale = max(1.0, slots / _MAX_SIMULATED)
        longest_first = sorted(self.running, reverse=True)
        ends = [longest_first[int(index * scale)] for index in range(math.ceil(len(longest_first) / scale))]
        num_slots, num_waiting = max(1, round(slots / scale)), self.num_waiting / scale
        num_simulated = min(math.ceil(num_waiting), _WAVES * num_slots)
        skipped = max(0.0, num_waiting - num_simulated) * self.mean_waiting / num_slots
        heapq.heapify(ends)
        for index in range(num_simulated if self.waiting else 0):
            length = self.waiting[index % len(self.waiting)]
            if len(ends) < num_slots:
                heapq.heappush(ends, length)
            else:
                heapq.heapreplace(ends, ends[0] + length)
        return skipped + max(ends, default=0.0)


def time_left(work: Work, pace: Pace, cost: StepCost) -> TimeLeft | None:
    """None until something was done."""
    slowness, num_steps = pace.slowness(cost), work.num_steps()
    if slowness is None:
        return None
    seconds = slowness * Done(0.0, work.num_tokens, num_steps, work.num_prompt_tokens).cost(cost)
    last = min(1.0, work.deviation / 2 / num_steps) if num_steps else 0.0
    error = math.hypot(work.error, last, _MODEL_ERROR, _YOUNG_ERROR / math.sqrt(1 + pace.age_s))
    return TimeLeft(seconds / (1 + error), seconds * (1 + error))
