"""What the next step computes, and how many steps to send ahead of the results. Pure functions."""

from collections.abc import Iterable
from math import ceil

import numpy as np
from numpy.typing import NDArray

SECONDS_QUEUED = 0.025
"""Work to keep in the worker's queue behind the running step. Engine.step takes a few milliseconds, and the manager may
lose a CPU time slice to another process; this covers both."""

NEW_STEP_WEIGHT = 0.2
"""Weight of the newest step in the moving average, which thus covers about ten steps."""


def split_prefill(num_left: Iterable[int], budget: int) -> list[int]:
    """Tokens of each prompt in a step, for the leading prompts that get any.

    First come first served; the last prompt gets the rest of `budget`. num_left: tokens that each prompt still needs,
    at least 1; read only until the budget is used up.
    """
    chunks: list[int] = []
    if budget > 0:
        for left in num_left:
            chunks.append(min(left, budget))
            budget -= left
            if budget <= 0:
                break
    return chunks


def prefill_rate(prefill_tokens: NDArray[np.int64], decode_steps: NDArray[np.int64], multiple: int) -> int:
    """Prefill tokens per step that keep the batch size constant, rounded up to a multiple of `multiple`.

    prefill_tokens: [N] tokens that each running sequence computes before it decodes. decode_steps: [N] steps that it is
    expected to need from its first to its last token. N >= 1.

    With N sequences of D steps each, N / D sequences end per step; with P prompt tokens each, N * P / D tokens per step
    replace them.
    """
    rate = int(prefill_tokens.sum()) * len(decode_steps) / max(1, int(decode_steps.sum()))
    return max(1, ceil(rate / multiple)) * multiple


def average_step_seconds(average: float | None, newest: float) -> float:
    """Exponential moving average of the time per step in seconds; `average` is None before the first step."""
    return newest if average is None else average + NEW_STEP_WEIGHT * (newest - average)


def wants_another_step(
    num_in_flight: int, seconds_queued: float | None, seconds_wanted: float, max_steps_ahead: int
) -> bool:
    """Whether to send one more step when the worker has `num_in_flight` steps.

    seconds_queued: predicted time of the steps behind the running one; None while nothing can be predicted. The running
    step does not count, however long it is: once it ends, only the steps behind it keep the worker busy.
    """
    if num_in_flight < 2:
        return num_in_flight < max_steps_ahead
    return seconds_queued is not None and seconds_queued < seconds_wanted and num_in_flight < max_steps_ahead


def num_steps_to_keep_in_flight(step_seconds: float | None, max_steps_ahead: int) -> int:
    """Steps in flight if each takes `step_seconds`: the running one, and `SECONDS_QUEUED` of work behind it.

    More steps would not make the worker busier: they would compute more tokens for sequences whose eos has not arrived
    yet, and delay a new request's first step. So many short steps of 2 ms are in flight, but only two of 100 ms. There
    are never fewer than two, or the worker would idle during every Engine.step; two also before the first result, when
    step_seconds is None. All of this is limited to `max_steps_ahead`.
    """
    wanted = 2 if step_seconds is None or step_seconds <= 0 else max(2, 1 + ceil(SECONDS_QUEUED / step_seconds))
    return min(wanted, max_steps_ahead)
