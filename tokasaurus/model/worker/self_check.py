"""What the checks of a start share. A start computes with small inputs on the device at hand, compares with plain
torch, and switches off what differs or raises.

Each check yields what it measured (attention_check, triton_check, step_check). `toka check` shows it all.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tokasaurus.messages.status import FlagRefused, UserError

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Largest allowed difference, as a share of the largest expected value, by dtype of what is computed."""


class Measured(NamedTuple):
    """How far a result is from what is expected."""

    name: str
    """What was computed, for the user."""
    error: float
    """The difference as a share of what is expected. NaN: only one of both is NaN somewhere."""
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance


class ComputesWrongly(Exception):
    """One line: what differs, and by how much."""


Measure: TypeAlias = Callable[[], Iterator[Measured]]


def compared(name: str, found: Tensor, expected: Tensor, tolerance: float) -> Measured:
    """Both of one shape: the largest difference as a share of the largest expected value. NaN equals NaN."""
    found, expected = found.double(), expected.double()
    is_nan = expected.isnan()
    if not torch.equal(found.isnan(), is_nan):
        return Measured(name, torch.nan, tolerance)
    found, expected = found.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0)
    if torch.equal(found, expected):
        return Measured(name, 0.0, tolerance)
    return Measured(name, float((found - expected).abs().max() / expected.abs().max()), tolerance)


def describe(measured: Measured) -> str:
    """One line on a result that is not right."""
    return f"{measured.name} differs by {measured.error:.2g}, allowed is {measured.tolerance:.2g}"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check has found."""

    feature: str
    """As the metric toka_switched_off names it."""
    measured: Measured | None
    """None: the check raised an error."""
    failure: str | None
    """One line if it is not right."""
    seconds: float
    """Since the last result of the same check, or its beginning."""


class Checks:
    """The checks of one start: their results, and what they have switched off."""

    def __init__(self, all_agree: Callable[[bool], bool] = bool, is_thorough: bool = False) -> None:
        """all_agree: whether it is true of every rank; all ranks run the same checks. is_thorough: check also what a
        start takes for granted, such as the kernels of the CPU."""
        self.all_agree = all_agree
        self.is_thorough = is_thorough
        self.results: list[Result] = []
        self.switched_off: list[str] = []
        """Features, in the order in which they were found."""

    @property
    def seconds(self) -> float:
        """Time of all comparisons, with the compilations and recordings that they began."""
        return sum(result.seconds for result in self.results)

    def passes(self, feature: str, measure: Measure, what: str, without: str, flag: str | None = None) -> bool:
        """Whether the feature computes rightly on all ranks. Otherwise it is noted as switched off, with one line in
        the log: `what` is switched off, why, and what happens `without`.

        what: the feature as the subject of a sentence, with its verb. flag: asks for the feature by name; then
        FlagRefused is raised instead. Raises OutOfMemoryError, which says nothing about the feature."""
        wrong = self.describe_wrong(feature, measure)
        if self.all_agree(wrong is None):
            return True
        wrong = wrong or "it fails on another rank"
        if flag is not None:
            raise FlagRefused(f"{flag}: {wrong}")
        logger.warning("%s switched off: %s; %s", what, wrong, without)
        self.switched_off.append(feature)
        return False

    def describe_wrong(self, feature: str, measure: Measure) -> str | None:
        """One line on the first result beyond its tolerance, or on what was raised; None if all is right."""
        failures: list[str] = []
        try:
            # All of them, also after a wrong one: other ranks wait for this one in the check's collectives.
            failures += [describe(measured) for measured in self.noting(feature, measure) if not measured.is_right]
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # of a library, its compilers or a driver, which have errors of many classes
            logger.debug("the check of %s failed", feature, exc_info=error)
            failures.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            self.results.append(Result(feature, None, failures[-1], 0.0))
        return next(iter(failures), None)

    def noting(self, feature: str, measure: Measure) -> Iterator[Measured]:
        """What `measure` yields, which is added to the results."""
        began_s = time.perf_counter()
        for measured in measure():
            ended_s = time.perf_counter()
            failure = None if measured.is_right else describe(measured)
            self.results.append(Result(feature, measured, failure, ended_s - began_s))
            yield measured
            began_s = time.perf_counter()

    def leave_out(self, feature: str, reason: str) -> None:
        """Note a feature that is switched off, which the caller has logged."""
        self.results.append(Result(feature, None, reason, 0.0))
        self.switched_off.append(feature)
