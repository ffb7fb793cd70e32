"""How long a step takes: a weight for each of the features by which the manager itself predicts steps."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.status import EngineLimits

_REWEIGHTINGS = 8


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, for each unit of `manager.planning.step_times.step_features`."""

    per_step: float
    per_row: float
    per_context_token: float
    """Of the decode rows."""
    per_prefill_token: float
    per_pair: float
    """Of a prefill token and a token of its context."""
    source: str

    def seconds(self, features: NDArray[np.float64]) -> float:
        weights = (self.per_step, self.per_row, self.per_context_token, self.per_prefill_token, self.per_pair)
        return float(features @ np.array(weights))


# docs/gpu.md: decode steps of Llama 3.1 8B in 6.2 ms with 1 row, 9.4 ms with 64 rows of 1,024 tokens and 43.7 ms with
# 1,024 rows of 384 tokens; prefill at 65 % of the speed that reads its multiplications off the roofline.
H100_8B = StepTimes(6.1e-3, 2.9e-5, 2.1e-8, 2.4e-5, 0.0, "simulated: docs/gpu.md's estimates for Llama 3.1 8B, H100")


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Of one real replica."""

    limits: dict[str, Any]
    """EngineLimits."""
    features: list[list[float]]
    """[steps, features]."""
    seconds: list[float]
    ended_s: list[float]
    """When the result of each was read, by `time.monotonic`."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "RecordedSteps":
        return cls(**json.loads(path.read_text()))

    def engine_limits(self) -> EngineLimits:
        """Those that matter here: without the costs of prefix groups, which are off."""
        simple = {field.name for field in fields(EngineLimits)} - {"hydragen", "switched_off"}
        return EngineLimits(**{name: value for name, value in self.limits.items() if name in simple})


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float], source: str) -> StepTimes:
    """The non-negative weights with the least sum of squared errors, each square divided by the predicted time: long
    steps may have larger errors, and the predictions of all steps add up to what they took."""
    table, times = np.array(features, np.float64), np.array(seconds, np.float64)
    scales = np.maximum(table.max(axis=0), 1.0)
    predicted = np.full(len(times), times.mean())
    for _ in range(_REWEIGHTINGS):
        weights = _non_negative_least_squares(table / scales, times, 1.0 / np.sqrt(predicted))
        predicted = np.maximum(table / scales @ weights, 1e-3 * times.mean())
    values = (weights / scales).tolist()
    return StepTimes(values[0], values[1], values[2], values[3], values[4], source)


def _non_negative_least_squares(
    table: NDArray[np.float64], times: NDArray[np.float64], importance: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[features]. Tries every set of features, and takes the best one without a negative weight."""
    rows, targets = table * importance[:, None], times * importance
    best, least = np.zeros(table.shape[1]), math.inf
    for chosen in itertools.product((False, True), repeat=table.shape[1]):
        weights = np.zeros(table.shape[1])
        weights[list(chosen)] = np.linalg.lstsq(rows[:, list(chosen)], targets, rcond=None)[0]
        error = float(((rows @ weights - targets) ** 2).sum())
        if (weights >= 0).all() and error < least:
            best, least = weights, error
    return best
