"""What the next step computes, and how many steps to send ahead of the results."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import ceil

from tokasaurus.manager.sequence import Sequence

SECONDS_QUEUED = 0.025
"""Work kept in the worker's queue behind the step that runs. The manager needs a few milliseconds for a turn, and may
lose a time slice of the CPU to another process; this covers both."""

NEW_STEP_WEIGHT = 0.2
"""Of the newest step in the moving average: some ten steps are remembered."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `num_tokens` prompt tokens of a sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one token for each sequence of `decode`, then the chunks of `prefill`."""

    decode: list[Sequence]
    prefill: list[PrefillChunk]


def plan_step(
    decoding: Iterable[Sequence], prefilling: Iterable[Sequence], max_tokens: int, max_rows: int
) -> StepPlan | None:
    """The next step, of at most `max_tokens` tokens and `max_rows` rows; None where there is nothing to compute.

    Decoding sequences come first, for each of them holds memory until it ends; prompts share what is left, first come
    first served, the last one cut where the tokens end.
    """
    decode = list(islice(decoding, min(max_tokens, max_rows)))
    num_tokens_left = max_tokens - len(decode)
    prefill: list[PrefillChunk] = []
    for sequence in islice(prefilling, max_rows - len(decode)):
        if num_tokens_left == 0:
            break
        num_tokens = min(num_tokens_left, sequence.num_prompt_tokens - sequence.num_kv_tokens)
        prefill.append(PrefillChunk(sequence, num_tokens))
        num_tokens_left -= num_tokens
    return StepPlan(decode, prefill) if decode or prefill else None


def average_step_seconds(average: float | None, newest: float) -> float:
    """Exponential moving average of a step's time; `average` is None before the first."""
    return newest if average is None else average + NEW_STEP_WEIGHT * (newest - average)


def num_steps_to_keep_in_flight(step_seconds: float | None, max_steps_ahead: int) -> int:
    """Steps that should be with the worker at any time: the one that runs, and `SECONDS_QUEUED` behind it.

    More would not make the worker busier: it would compute more tokens for sequences whose eos is not back yet, and
    make a new request wait longer for its first step. So a device whose step takes 2 ms gets many steps ahead, one
    whose step takes 100 ms two, and never fewer than two, for with one the worker would idle through every turn of the
    manager. Two also before the first result, when step_seconds is None. `max_steps_ahead` bounds all of this.
    """
    wanted = 2 if step_seconds is None or step_seconds <= 0 else max(2, 1 + ceil(SECONDS_QUEUED / step_seconds))
    return min(wanted, max_steps_ahead)
