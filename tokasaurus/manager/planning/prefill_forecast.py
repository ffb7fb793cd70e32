"""Prefill forecast: the step in which each prefill finishes, given that decoding sequences come first in every step and
prompts share the remaining tokens."""

# U changes in the number of decoding sequences, K prompts in the order of service

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.planning.kv_simulation import SequenceLoads

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeCounts:
    """How many sequences decode in each future step; step 1 is the next one."""

    steps: Int64Array
    """[U] sorted and unique, >= 1: steps whose number of decoding sequences differs from the step before."""
    counts: Int64Array
    """[U] decoding sequences in each step from steps[i] to before steps[i + 1]; 0 before the first."""


def count_decoding(loads: SequenceLoads) -> DecodeCounts:
    """Number of sequences in `loads` that decode in each step; each does so in steps start_steps + 1 to start_steps +
    num_steps.

    Built once and reused for every forecast of the same Engine.step.
    """
    ends = loads.start_steps + loads.num_steps
    size = int(ends.max(initial=0)) + 1
    changes = np.bincount(loads.start_steps, minlength=size) - np.bincount(ends, minlength=size)
    steps = np.flatnonzero(changes)
    return DecodeCounts(steps + 1, changes[steps].cumsum())


@dataclass(frozen=True, slots=True)
class PrefillForecast:
    """When each prefill finishes, and the state after the last one, from which `extend` continues."""

    start_steps: Int64Array
    """[K] the step that computes the last prompt tokens; the sequence decodes from the next step on."""
    _future_steps: "_FutureSteps"

    def extend(self, num_left: Int64Array, decode_steps: Int64Array) -> "PrefillForecast":
        """Forecast further prompts, served after all earlier ones; the result's start_steps cover only the new prompts.

        Cost depends on the new prompts only. Does not change this forecast.
        """
        future_steps = self._future_steps.copy()
        return PrefillForecast(future_steps.serve(num_left, decode_steps), future_steps)


def forecast_prefill(
    num_left: Int64Array, decode_steps: Int64Array, counts: DecodeCounts, max_tokens: int, prefill_rate: int | None
) -> PrefillForecast:
    """Find the step in which each of K prefills finishes.

    The forecast goes from event to event: a prefill finishes, or the number of decoding sequences changes.
    num_left: [K] prompt tokens still to compute, >= 1. decode_steps: [K] steps that each sequence decodes after its
    prefill; each of them leaves one token less for the prompts behind it. counts: sequences that decode already.
    max_tokens: most tokens per step, >= 1. Prompts get the tokens that decoding leaves, at most `prefill_rate` (>= 1)
    unless it is None, first come first served; several prompts may share a step.
    """
    max_prefill = max_tokens if prefill_rate is None else prefill_rate
    future_steps = _FutureSteps(counts, max_tokens, max_prefill)
    return PrefillForecast(future_steps.serve(num_left, decode_steps), future_steps)


@dataclass(slots=True)
class _FutureSteps:
    """The future steps up to the one in which the last prefill so far finishes."""

    counts: DecodeCounts
    max_tokens: int
    max_prefill: int
    step: int = 0
    capacity: int = 0
    """Prompt tokens that fit into the steps up to and including `step`."""
    num_served: int = 0
    """Tokens of all prompts so far; at most `capacity`, since the last step may have unused tokens."""
    num_changes: int = 0
    """Entries of `counts` that have taken effect by `step`."""
    leave_steps: list[int] = field(default_factory=list)
    """A heap: the last decode step of each sequence whose prefill has finished and that decodes after `step`."""

    def copy(self) -> "_FutureSteps":
        return replace(self, leave_steps=self.leave_steps.copy())

    def serve(self, num_left: Int64Array, decode_steps: Int64Array) -> Int64Array:
        """Advance until the prefills of these prompts have finished; [K] the steps in which they do."""
        goals: list[int] = (num_left.cumsum() + self.num_served).tolist()
        num_steps: list[int] = decode_steps.tolist()
        done_steps: list[int] = []
        while True:
            num_done = bisect_right(goals, self.capacity, len(done_steps))
            for decode in num_steps[len(done_steps) : num_done]:
                heappush(self.leave_steps, self.step + decode)
            done_steps += [self.step] * (num_done - len(done_steps))
            if num_done == len(goals):
                break
            self._advance(goals[num_done])
        self.num_served = goals[-1] if goals else self.num_served
        return np.array(done_steps, np.int64)

    def _advance(self, goal: int) -> None:
        """Advance by one or more steps with the same number of decoding sequences, until `capacity` reaches `goal`."""
        first = self.step + 1
        while self.leave_steps and self.leave_steps[0] < first:
            heappop(self.leave_steps)
        num_decoding = len(self.leave_steps)
        last: float = self.leave_steps[0] if self.leave_steps else inf
        steps, counts = self.counts.steps, self.counts.counts
        while self.num_changes < len(steps) and steps[self.num_changes] <= first:
            self.num_changes += 1
        if self.num_changes > 0:
            num_decoding += int(counts[self.num_changes - 1])
        if self.num_changes < len(steps):
            last = min(last, int(steps[self.num_changes]) - 1)

        num_tokens = min(self.max_prefill, self.max_tokens - num_decoding)
        if num_tokens <= 0:  # decoding takes all tokens: nothing changes until a sequence ends
            assert last < inf, "a step without decoding sequences has tokens for prompts"
            self.step = int(last)
            return
        num_wanted = -((self.capacity - goal) // num_tokens)
        num_steps = int(min(num_wanted, last - first + 1))
        self.step += num_steps
        self.capacity += num_steps * num_tokens
