"""How long a step may plausibly take, learned from the steps before: tells a long step from one that hangs."""

import math

import numpy as np
from numpy.typing import NDArray

CONTEXT_TOKENS = 512
"""Attention over this much context counts as much as all other work for a token. Most models need more context, but a
small model with torch's attention does not: its step of 8,000 tokens takes 250 times as long as one of 500."""

DECAY = 0.99
"""A class of steps forgets its slowest step by this factor with each new one."""


def step_cost(num_tokens: NDArray[np.int32], num_kv_tokens: NDArray[np.int64]) -> float:
    """The cost of a step, in tokens without context.

    num_tokens: [rows], tokens of each row. num_kv_tokens: [rows], the row's context at the end of the step.
    """
    return float(num_tokens @ (1 + num_kv_tokens / CONTEXT_TOKENS))


class StepTimes:
    """The slowest recent step of each class of costs; the classes are powers of two.

    seconds_per_token, seconds_per_pair: longest times of a token without context, and of attention for each token and
    token of its context, assumed until a step has been timed.
    """

    def __init__(self, seconds_per_token: float, seconds_per_pair: float = 0.0) -> None:
        self._seconds_per_cost = max(seconds_per_token, CONTEXT_TOKENS * seconds_per_pair)
        self._slowest: dict[int, float] = {}

    def note(self, cost: float, seconds: float) -> None:
        """A step of this cost took `seconds`."""
        step_class = _class_of(cost)
        self._slowest[step_class] = max(seconds, DECAY * self._slowest.get(step_class, 0.0))

    def longest(self, cost: float) -> float:
        """Seconds that a step of this cost takes at most, going by its class, a cheaper or a dearer one."""
        asked = _class_of(cost)
        # A dearer step takes no less. A cheaper step's time grows at most with the cost.
        bounds = [seconds * 2.0 ** max(0, asked - step_class) for step_class, seconds in self._slowest.items()]
        return min(bounds, default=self._seconds_per_cost * cost)


def _class_of(cost: float) -> int:
    return math.ceil(math.log2(max(1.0, cost)))
