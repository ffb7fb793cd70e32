"""What the next step computes, and how many steps to send ahead of the results. All pure."""

from collections.abc import Iterable
from math import ceil

import numpy as np
from numpy.typing import NDArray

SECONDS_QUEUED = 0.025
"""Work kept in the worker's queue behind the step that runs. The manager needs a few milliseconds for a turn, and may
lose a time slice of the CPU to another process; this covers both."""

NEW_STEP_WEIGHT = 0.2
"""Of the newest step in the moving average: some ten steps are remembered."""


def split_prefill(num_left: Iterable[int], budget: int) -> list[int]:
    """Tokens of each prompt in a step, of the first prompts that get any: first come first served, the last cut where
    `budget` ends. num_left: tokens that each prompt still needs, at least 1 each; read no further than that."""
    chunks: list[int] = []
    if budget > 0:
        for left in num_left:
            chunks.append(min(left, budget))
            budget -= left
            if budget <= 0:
                break
    return chunks


def prefill_rate(prefill_tokens: NDArray[np.int64], decode_steps: NDArray[np.int64], multiple: int) -> int:
    """Prefill tokens a step that keep the batch as it is: as many prompts begin as completions end.

    prefill_tokens: that each running sequence had or has to compute before it decodes. decode_steps: that it is
    expected to need from its first to its last token. Both [N], N >= 1. Rounded up to a multiple of `multiple`.

    N sequences of D steps each end N / D times a step; with P tokens each, N * P / D tokens a step replace them.
    """
    rate = int(prefill_tokens.sum()) * len(decode_steps) / max(1, int(decode_steps.sum()))
    return max(1, ceil(rate / multiple)) * multiple


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
