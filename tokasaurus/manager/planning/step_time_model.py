"""Predicts the time of a step from its rows, prefill tokens and context, learned from the steps before."""

import math

import numpy as np
from numpy.typing import NDArray

NUM_FEATURES = 5

IS_OF_DECODE = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
"""1 for the features of a step that are not zero without prefill."""

RATE = 0.3
"""Share of the (logarithmic) error that one step corrects. Ten steps follow a change; noise is averaged over about
three steps."""

MAX_FACTOR = 4.0
"""A step that took more than this many times its prediction, or less than the inverse share of it, counts as if it took
just that. So one outlier moves a prediction by at most 4 ** RATE = 1.5, while a lasting change is followed."""

LEAST_SHARE = 0.01
"""Least share of a step's time that a feature gets when it is not zero for the first time."""

SECONDS_RANGE = 1e-6, 3600.0
"""Shortest and longest plausible time of a step, in seconds."""


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


class StepTimeModel:
    """A non-negative weight for each feature, fitted online to the relative error by exponentiated gradient descent.

    A step changes each weight by a factor, and most the weights that account for most of its time. So weights stay
    positive, features need no common scale, steps of 2 ms count as much as steps of 60 ms, and a thousand decode steps
    do not change what is known about prefill. The prediction is linear in the features, so the time of several steps is
    predicted from the sum of their features.

    Source: Kivinen and Warmuth, Exponentiated gradient versus gradient descent for linear predictors, 1997.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(NUM_FEATURES)
        """Seconds per unit of each feature, at least 0; 0 until a step has had the feature."""

    def knows(self, features: NDArray[np.float64]) -> bool:
        """Whether an observed step had each of these features. The prediction is too small otherwise."""
        return bool((self.weights > 0)[features > 0].all())

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
            unexplained = max(seconds - sum(parts), LEAST_SHARE * seconds) / len(new)
            for index in new:
                weights[index], parts[index] = unexplained / values[index], unexplained
        predicted = sum(parts)
        most = math.log(MAX_FACTOR)
        error = min(max(math.log(seconds / predicted), -most), most)
        # Scaled so that the prediction for this step changes by the factor exp(RATE * error), to first order.
        scale = RATE * error * predicted / sum(part * part for part in parts)
        self.weights = np.array(
            [weight * math.exp(min(max(scale * part, -1.0), 1.0)) for weight, part in zip(weights, parts, strict=True)]
        )
