"""In which step each prompt will be done, when decoding sequences come first and prompts share what is left."""

# U changes in the number of decoding sequences, K prompts in the order in which they are served

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
    """[U] sorted and unique, >= 1: the steps in which another number of sequences decodes than in the step before."""
    counts: Int64Array
    """[U] sequences that decode in each step from `steps` on, up to the next of `steps`; none before the first."""


def count_decoding(loads: SequenceLoads) -> DecodeCounts:
    """Sequences of `loads` that decode in each step: each does so in steps start_steps + 1 to start_steps + num_steps.

    Built once and reused for every forecast of the same turn.
    """
    ends = loads.start_steps + loads.num_steps
    size = int(ends.max(initial=0)) + 1
    changes = np.bincount(loads.start_steps, minlength=size) - np.bincount(ends, minlength=size)
    steps = np.flatnonzero(changes)
    return DecodeCounts(steps + 1, changes[steps].cumsum())


@dataclass(frozen=True, slots=True)
class PrefillForecast:
    """When prompts will be done, and the state of things after that, from which `extend` goes on."""

    start_steps: Int64Array
    """[K] the step in which the prompt's last chunk goes out: it decodes from the step after that on."""
    _steps_to_come: "_StepsToCome"

    def extend(self, num_left: Int64Array, decode_steps: Int64Array) -> "PrefillForecast":
        """The forecast for further prompts, served after all earlier ones; its start_steps are theirs alone.

        Costs what the new prompts take. This forecast stays as it is.
        """
        steps_to_come = self._steps_to_come.copy()
        return PrefillForecast(steps_to_come.serve(num_left, decode_steps), steps_to_come)


def forecast_prefill(
    num_left: Int64Array, decode_steps: Int64Array, counts: DecodeCounts, max_tokens: int, prefill_rate: int | None
) -> PrefillForecast:
    """The step in which each of K prompts is done, event by event: a prompt done, or another number decoding.

    num_left: [K] prompt tokens still to compute, >= 1. decode_steps: [K] steps that the sequence decodes afterwards;
    meanwhile it takes a token of each step from the prompts behind it. counts: sequences that decode already.
    max_tokens: of a step, >= 1; prompts get what decoding leaves, at most `prefill_rate` (>= 1) where that is given,
    first come first served, and several may share a step.
    """
    max_prefill = max_tokens if prefill_rate is None else prefill_rate
    steps_to_come = _StepsToCome(counts, max_tokens, max_prefill)
    return PrefillForecast(steps_to_come.serve(num_left, decode_steps), steps_to_come)


@dataclass(slots=True)
class _StepsToCome:
    """The run of steps up to the one in which the last prompt so far is done."""

    counts: DecodeCounts
    max_tokens: int
    max_prefill: int
    step: int = 0
    capacity: int = 0
    """Prompt tokens that fit into the steps up to `step`."""
    num_served: int = 0
    """Tokens of all prompts so far: at most `capacity`, for their last step may have some left."""
    num_changes: int = 0
    """Entries of `counts` that `step` has reached."""
    leave_steps: list[int] = field(default_factory=list)
    """A heap: of the prompts done, each one that decodes after `step`, and the last step in which it does."""

    def copy(self) -> "_StepsToCome":
        return replace(self, leave_steps=self.leave_steps.copy())

    def serve(self, num_left: Int64Array, decode_steps: Int64Array) -> Int64Array:
        """Go on until these prompts are done too; [K] the steps in which they are."""
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
            self._pass_steps(goals[num_done])
        self.num_served = goals[-1] if goals else self.num_served
        return np.array(done_steps, np.int64)

    def _pass_steps(self, goal: int) -> None:
        """Take the next step, and those after it in which as many decode, until the capacity reaches `goal`."""
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
        if num_tokens <= 0:  # all of them decode: nothing changes before one has left
            assert last < inf, "a step without a decoding sequence has tokens for prompts"
            self.step = int(last)
            return
        num_wanted = -((self.capacity - goal) // num_tokens)
        num_steps = int(min(num_wanted, last - first + 1))
        self.step += num_steps
        self.capacity += num_steps * num_tokens
