"""Whether prefix groups save time, by the steps in service: trials in which one step does without, and what they show.

The costs of groups were measured once, for a few shapes, on a machine that may have been busy. A trial is a decode step
with groups where its neighbours have none, or the other way round. The costs are scaled so that the choice which they
make would have lost least time in the latest trials, once these differ from what was measured by more than their noise.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST_INTERVAL = 128
MAX_INTERVAL = 4096
"""Decode steps before the first trial, and between trials at most. Each trial after which the choice is clearly right
multiplies the interval by 4, so that trials cost far less than 1 % of the time."""

OPTIMISM = 4.0
"""Where no group is formed, those are tried that would be with a fraction of the costs."""

NUM_KEPT = 32
"""Trials that count."""

MAX_GAIN = 0.25
"""A trial that shows more than this share of a step's time counts as if it showed this: another process may have
delayed one step."""

MIN_REGRET = 0.02
"""Least share of a step's time that another scale must have saved in the mean of the trials, to be used."""

DOUBT = 1.5
"""Standard deviations of a sum of noise: what trials show together counts if it is more. Three equal trials suffice."""

SIMILAR = 0.05
"""Greatest difference of the rows of steps that are compared."""


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A decode step that has groups while its neighbours have none, or none while they have some."""

    has_groups: bool
    alone: float
    """Tokens of shared prefixes that the grouped rows read if they attend alone."""
    together: float
    """What attention to them takes in groups, in the same unit, by the costs that were measured."""


class GroupTrials:
    """Decides when to make a trial, and keeps what trials have shown."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Factor for the costs that were measured."""
        self._observed: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        self._interval = FIRST_INTERVAL
        self._num_steps = 0  # decode steps since the last trial
        self._before: tuple[int, float] | None = None  # rows and seconds of the last step, if it only decoded
        # a trial's step, until the one after it: with its rows, its seconds, and those of the step before
        self._open: tuple[GroupTrial, int, float, float] | None = None

    def is_due(self) -> bool:
        """Called for each step that only decodes: whether it should be a trial."""
        self._num_steps += 1
        return self._num_steps > self._interval

    def begin(self) -> None:
        """A trial is made now, or there is nothing to try."""
        self._num_steps = 0

    def note(self, num_rows: int, has_prefill: bool, trial: GroupTrial | None, seconds: float) -> bool:
        """The result of a step, in the order of the steps. Returns whether the scale has changed."""
        before, self._before = self._before, None
        begun, self._open = self._open, None
        if has_prefill:
            return False
        if trial is not None:
            if before is not None and _are_similar(before[0], num_rows):
                self._open = trial, num_rows, seconds, before[1]
            return False
        self._before = num_rows, seconds
        if begun is None or not _are_similar(begun[1], num_rows):
            return False
        return self._observe(begun[0], begun[2], (begun[3] + seconds) / 2)

    def _observe(self, trial: GroupTrial, trial_seconds: float, usual_seconds: float) -> bool:
        alone_s, together_s = (usual_seconds, trial_seconds) if trial.has_groups else (trial_seconds, usual_seconds)
        gain = (alone_s - together_s) / max(alone_s, together_s)
        self._observed.append((trial.alone / trial.together, min(max(gain, -MAX_GAIN), MAX_GAIN)))
        before, self.scale = self.scale, self._best_scale()
        gains = [gain if ratio > self.scale else -gain for ratio, gain in self._observed]
        is_confirmed = gains[-1] > 0 and _is_clear(gains)
        self._interval = min(4 * self._interval, MAX_INTERVAL) if is_confirmed else FIRST_INTERVAL
        return before != self.scale

    def _best_scale(self) -> float:
        """1, unless another scale would clearly have lost less: then the one that loses least, and is nearest to 1."""
        losses = list(self._losses(1.0))
        best = sum(losses), 1.0, 1.0
        # The choice changes where the scale passes a trial's ratio.
        for scale in (factor * ratio for ratio, _ in self._observed for factor in (0.99, 1.01)):
            others = list(self._losses(scale))
            if _is_clear([loss - other - MIN_REGRET for loss, other in zip(losses, others, strict=True)]):
                best = min(best, (sum(others), max(scale, 1 / scale), scale))
        return best[2]

    def _losses(self, scale: float) -> Iterator[float]:
        """Time lost in each trial if groups are formed where they save by the scaled costs, in steps."""
        return (max(0.0, -gain if ratio > scale else gain) for ratio, gain in self._observed)


def _is_clear(gains: Sequence[float]) -> bool:
    """Whether the sum of the gains is greater than noise makes it, if the gains are noise around 0."""
    return sum(gains) > DOUBT * math.sqrt(sum(gain * gain for gain in gains))


def _are_similar(num_rows: int, other: int) -> bool:
    return abs(num_rows - other) <= SIMILAR * max(num_rows, other)
