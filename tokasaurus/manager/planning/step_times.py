"""How long steps take, learned from the steps before.

StepTimeModel predicts the time of a step from its rows, prefill tokens and context. StepTimes bounds the longest
plausible time, which tells a long step from one that hangs.
"""

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

NUM_FEATURES = 5
_PAIRS = 4

IS_OF_DECODE = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
"""1 for each feature that a step without prefill has."""

RATE = 0.3
"""Share of the (logarithmic) error that one decode step corrects. Ten steps follow a change; noise is averaged over
about three steps."""

MAX_FACTOR = 4.0
"""The time of a step counts as no more than this many times its prediction, and no less than the prediction divided by
this. So one outlier moves a prediction by at most 4 ** RATE = 1.5, while a lasting change is followed."""

MIN_SHARE = 0.01
"""Smallest share of a step's time attributed to a feature that occurs for the first time."""

MAX_PAIRS_SHARE = 0.9
"""Largest share of the time of the first step with prefill that is attributed to context."""

ANCHOR = 2 * 2048.0**2
"""Weight of the start-up measurement of context's cost: as much as two steps with a context of 2,048. A few steps with
long prompts outweigh it. Steps with short prompts do not: their time per token depends mostly on how few tokens they
have."""

FORGETTING = 0.99
"""Weight of a step with prefill, relative to the one after it: the fit covers about a hundred of them. How a token's
time grows with its context is a property of the device and changes little; a change of speed is followed by RATE."""

SMALL_PREFILL = 64.0
"""A step with this many prefill tokens has half the weight of a very large one: its time per token is noisy."""

CAUTION = 0.02
"""Weight of the previous fit, relative to the latest steps. It decides what the latest steps do not show, such as the
cost of context while all prompts have the same length."""

GROWTH = 1.5
_NUM_LATEST = 8
"""`max_prefill` is GROWTH times the largest prefill of the latest _NUM_LATEST steps with any."""

MIN_WEIGHT = 1e-15
"""Smallest weight of a feature that has occurred, in seconds per unit."""

SECONDS_RANGE = 1e-6, 3600.0
"""Shortest and longest plausible time of a step, in seconds."""

CONTEXT_TOKENS = 512
"""Attention over this much context counts as much as all other work for a token. Most models need more context, but a
small model with torch's attention does not: its step of 8,000 tokens takes 250 times as long as one of 500."""

DECAY = 0.99
"""With each new step of a class, the time of its slowest step is multiplied by this."""


def step_features(
    num_tokens: NDArray[np.int32], num_kv_tokens: NDArray[np.int64], num_decode: int
) -> NDArray[np.float64]:
    """What a step's time depends on, float64 [5]: 1, decode rows, their context, prefill tokens, tokens x context.

    num_tokens: [rows], tokens of each row, the decode rows first. num_kv_tokens: [rows], each row's context at the end
    of the step. Decode reads each row's keys and values; prefill computes a score for each pair of token and context.
    """
    tokens, context = num_tokens[num_decode:], num_kv_tokens[num_decode:]
    decode_context = num_kv_tokens[:num_decode].sum()
    return np.array([1, num_decode, decode_context, tokens.sum(), tokens @ context], np.float64)


def decode_features(num_kv_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """`step_features` of a step of decode rows alone, with this context each."""
    return np.array([1, len(num_kv_tokens), num_kv_tokens.sum(), 0, 0], np.float64)


class StepTimeModel:
    """A non-negative weight for each feature, fitted online to relative errors.

    The weights of decode are fitted by exponentiated gradient descent: a step changes each weight by a factor, and most
    the weights that account for most of its time. So weights stay positive, features need no common scale, steps of 2
    ms count as much as steps of 60 ms, and a thousand decode steps do not change what is known about prefill. The
    prediction is linear in the features, so the time of several steps is predicted from the sum of their features.
    Source: Kivinen and Warmuth, Exponentiated gradient versus gradient descent for linear predictors, 1997.

    The two weights of prefill are fitted by least squares over the latest steps with prefill. They limit the prompts of
    a step, and gradient descent would need too many prompts to separate the cost of a token from the cost of context.

    first_per_pair: seconds for each pair of a prefill token and a token of its context, measured at the start; 0 if it
    was not. The first prompts are often too short to show it, and the next may be many times as long.
    """

    def __init__(self, first_per_pair: float = 0.0) -> None:
        self.first_per_pair = first_per_pair
        self.weights = np.zeros(NUM_FEATURES)
        """Seconds per unit of each feature, at least 0; 0 until a step has had the feature."""
        self._num_prefill_tokens = deque[float](maxlen=_NUM_LATEST)  # of the latest steps with any
        self._moments = [0.0] * 5  # of the line: sums of 1, x, x * x, y and x * y
        if first_per_pair > 0:  # as if a line through the origin with this slope had been seen
            self._moments[2], self._moments[4] = ANCHOR, ANCHOR * first_per_pair

    def knows(self, features: NDArray[np.float64]) -> bool:
        """Whether an observed step had each of these features. The prediction is too small otherwise."""
        return bool((self.weights > 0)[features > 0].all())

    @property
    def prefill_weights(self) -> tuple[float, float]:
        """Seconds for each prefill token, and for each pair of one and a token of its context; 0 until known."""
        return float(self.weights[3]), float(self.weights[4])

    @property
    def max_prefill(self) -> float:
        """Largest prefill whose time can be predicted, in tokens; inf until a step had prefill. With more, an error in
        one weight could make a step many times too long."""
        return GROWTH * max(self._num_prefill_tokens, default=math.inf)

    def predict(self, features: NDArray[np.float64]) -> float:
        """Seconds of a step, or of several whose features were added."""
        return float(self.weights @ features)

    def note(self, features: NDArray[np.float64], seconds: float) -> None:
        """A step with these features took `seconds`."""
        seconds = min(max(seconds, SECONDS_RANGE[0]), SECONDS_RANGE[1])
        values, weights = features.tolist(), self.weights.tolist()
        parts = [value * weight for value, weight in zip(values, weights, strict=True)]
        new = [index for index, value in enumerate(values) if value > 0 and weights[index] == 0]
        if new:
            unexplained = max(seconds - sum(parts), MIN_SHARE * seconds)
            if _PAIRS in new:  # not an equal share: the next chunk of the prompt has several times the context
                new.remove(_PAIRS)
                expected = self.first_per_pair * values[_PAIRS] or MIN_SHARE * unexplained
                parts[_PAIRS] = min(expected, MAX_PAIRS_SHARE * unexplained)
                weights[_PAIRS] = parts[_PAIRS] / values[_PAIRS]
                unexplained -= parts[_PAIRS] if new else 0.0
            for index in new:
                parts[index] = unexplained / len(new)
                weights[index] = parts[index] / values[index]
        predicted = sum(parts)
        max_error = math.log(MAX_FACTOR)
        error = min(max(math.log(seconds / predicted), -max_error), max_error)
        if values[3] > 0:
            self._num_prefill_tokens.append(values[3])
            prefill_seconds = max(predicted * math.exp(error) - sum(parts[:3]), MIN_SHARE * seconds)
            change = math.exp(RATE * error)
            per_token, per_pair = change * weights[3], change * weights[4]
            self._moments[3:] = (change * moment for moment in self._moments[3:])
            weights[3:] = self._fit_prefill(values[3], values[4] / values[3], prefill_seconds, per_token, per_pair)
        # Scaled so that the prediction for this step changes by the factor exp(RATE * error), to first order.
        scale = RATE * error * predicted / sum(part * part for part in parts)
        for index in range(3):
            weights[index] *= math.exp(min(max(scale * parts[index], -1.0), 1.0))
        self.weights = np.array(weights)

    def _fit_prefill(
        self, num_tokens: float, context: float, seconds: float, per_token: float, per_pair: float
    ) -> tuple[float, float]:
        """The weights of prefill after a step whose prefill took `seconds`. per_token, per_pair: the weights before.

        context: mean context of the tokens. Fits a line to seconds per token by context.
        """
        weight, rate = num_tokens / (num_tokens + SMALL_PREFILL), seconds / num_tokens
        new = weight, weight * context, weight * context * context, weight * rate, weight * rate * context
        self._moments = [FORGETTING * old + value for old, value in zip(self._moments, new, strict=True)]
        count, contexts, squares, rates, products = self._moments
        rates, count = rates + CAUTION * count * per_token, (1 + CAUTION) * count
        products, squares = products + CAUTION * squares * per_pair, (1 + CAUTION) * squares
        determinant = count * squares - contexts * contexts
        first = (rates * squares - products * contexts) / determinant
        second = (products * count - rates * contexts) / determinant
        if first < MIN_WEIGHT:
            return MIN_WEIGHT, products / squares
        if second < MIN_WEIGHT:
            return rates / count, MIN_WEIGHT
        return first, second


def step_cost(num_tokens: NDArray[np.int32], num_kv_tokens: NDArray[np.int64]) -> float:
    """The cost of a step, in tokens without context.

    num_tokens: [rows], tokens of each row. num_kv_tokens: [rows], the row's context at the end of the step.
    """
    return float(num_tokens @ (1 + num_kv_tokens / CONTEXT_TOKENS))


class StepTimes:
    """The slowest recent step of each class of costs; the classes are powers of two.

    seconds_per_token, seconds_per_pair: longest times of a token without context, and of attention for each pair of a
    token and a token of its context; assumed until a step has been timed.
    """

    def __init__(self, seconds_per_token: float, seconds_per_pair: float = 0.0) -> None:
        self._seconds_per_cost = max(seconds_per_token, CONTEXT_TOKENS * seconds_per_pair)
        self._slowest: dict[int, float] = {}

    def note(self, cost: float, seconds: float) -> None:
        """A step of this cost took `seconds`."""
        step_class = _class_of(cost)
        self._slowest[step_class] = max(seconds, DECAY * self._slowest.get(step_class, 0.0))

    def longest(self, cost: float) -> float:
        """Longest plausible time of a step of this cost, in seconds, by the slowest step of each class."""
        asked = _class_of(cost)
        # A dearer step takes no less. A cheaper step's time grows at most with the cost.
        bounds = [seconds * 2.0 ** max(0, asked - step_class) for step_class, seconds in self._slowest.items()]
        return min(bounds, default=self._seconds_per_cost * cost)


def _class_of(cost: float) -> int:
    return math.ceil(math.log2(max(1.0, cost)))
