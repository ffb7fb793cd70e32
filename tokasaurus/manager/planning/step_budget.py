"""How many prompt tokens the next step computes, how many steps to send ahead of the results, and which sequences to
preempt for a step that lacks blocks."""

# N sequences, M microbatches

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray

SECONDS_QUEUED = 0.025
"""Work to keep in the worker's queue behind the running step. Engine.step takes a few milliseconds, and the manager may
lose a CPU time slice to another process; this covers both."""

MIN_STEP_SECONDS = 0.25
"""Shortest limit on a step with prompts, in seconds, without max_step_seconds: readers of a stream hardly notice such
a gap."""

MAX_STREAM_SECONDS = 1.0
"""Longest such limit while a sequence is streamed, in seconds."""

STEP_OVERHEAD = 0.02
"""Largest share of a step's time for costs that every step has, such as reading the weights."""

MIN_CHUNK = 16
"""Fewest prompt tokens that a step computes, however long they are expected to take, so that prompts advance."""

_MIN_SPARE_TOKENS = 64
"""Prompt tokens that one step of a round may always have beyond the others, so that short prompts need not wait."""

_MAX_ROUNDS = 64
"""Most rounds that `prefill_per_round` follows; of a longer prefill, it averages these."""


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step with prompts may take, in seconds."""

    seconds: float = inf
    stream_seconds: float = inf
    """The same while a sequence is streamed."""

    def describe(self) -> str:
        """The limit as text for the user."""
        if self.stream_seconds == self.seconds:
            return f"at most {self.seconds:.3g} s each"
        return f"at most {self.seconds:.3g} s each, {self.stream_seconds:.3g} s while anything is streamed"

    def prefill_seconds(self, decode_seconds: float, is_streaming: bool) -> float:
        """Seconds for the prompts of a step whose decode rows take decode_seconds: what these leave, but at least half
        of the limit. Otherwise prompts would hardly advance beside many rows."""
        limit = self.stream_seconds if is_streaming else self.seconds
        return max(limit - decode_seconds, limit / 2)


def make_step_limit(max_step_seconds: float | None, seconds_per_step: float) -> StepLimit:
    """The limit of max_step_seconds. None: the shortest limit that costs no throughput.

    seconds_per_step: time of a step of one token. Prompts in many small steps pay it more often.
    """
    if max_step_seconds is not None:
        return StepLimit(max_step_seconds, max_step_seconds)
    seconds = max(MIN_STEP_SECONDS, seconds_per_step / STEP_OVERHEAD)
    return StepLimit(seconds, min(seconds, MAX_STREAM_SECONDS))


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The time that the prompts of a step may take, and the time that each token is expected to take."""

    seconds: float
    per_token: float
    """Seconds for each token, without attention."""
    per_pair: float
    """Seconds for each pair of a token and a token of its context, counted at the end of the chunk."""
    max_tokens: float = inf
    """Most tokens for which these times are known well enough."""

    def cost(self, start: int, num_tokens: int) -> float:
        """Seconds for `num_tokens` tokens of a prompt, `start` of which are computed."""
        return num_tokens * (self.per_token + self.per_pair * (start + num_tokens))

    def tokens_within(self, start: int, seconds: float) -> float:
        """The number of tokens n, not rounded, with cost(start, n) = seconds; inf if tokens take no time."""
        linear = self.per_token + self.per_pair * start
        # The positive root of per_pair * n ** 2 + linear * n - seconds, without a difference of nearly equal numbers.
        divisor = linear + sqrt(linear * linear + 4 * self.per_pair * seconds)
        return 2 * seconds / divisor if divisor > 0 else inf

    def usual_rate(self, starts: NDArray[np.int64], num_left: NDArray[np.int64]) -> float:
        """Tokens per step, in the mean until these prompts are computed in chunks; inf if they take no time.

        starts, num_left: [N] tokens computed and tokens left of each prompt. N >= 1.
        """
        # A small chunk attends to the context before it: in the mean, half of the prompt's rest.
        seconds = num_left @ (self.per_token + self.per_pair * (starts + num_left / 2))
        return self.seconds * int(num_left.sum()) / float(seconds) if seconds > 0 else inf


def split_prefill(prompts: Iterable[tuple[int, int]], budget: int, time: PrefillTime) -> list[int]:
    """Tokens of each prompt in a step, for the leading prompts that get any: at most `budget` in all.

    First come first served; the last prompt gets what is left, in tokens or in time. The first MIN_CHUNK tokens need no
    time. prompts: tokens computed, and tokens left, at least 1; read only until nothing is left for them.
    """
    chunks: list[int] = []
    seconds, budget, num_free = time.seconds, int(min(budget, time.max_tokens)), MIN_CHUNK
    if budget > 0:
        for start, left in prompts:
            num_in_time = time.tokens_within(start, max(0.0, seconds))
            chunk = int(min(left, budget, max(num_in_time, num_free)))
            if chunk:
                chunks.append(chunk)
            budget -= chunk
            num_free -= chunk
            if chunk < left or budget <= 0:
                break
            seconds -= time.cost(start, chunk)
    return chunks


def prefill_rate(
    prefill_tokens: NDArray[np.int64], decode_steps: NDArray[np.int64], prefill_round_up_multiple: int
) -> int:
    """Prefill tokens per step that keep the batch size constant, rounded up as the flag says.

    prefill_tokens: [N] tokens that each running sequence computes before it decodes. decode_steps: [N] steps that it is
    expected to need from its first to its last token. N >= 1.

    With N sequences of D steps each, N / D sequences end per step; with P prompt tokens each, N * P / D tokens per step
    replace them.
    """
    rate = int(prefill_tokens.sum()) * len(decode_steps) / max(1, int(decode_steps.sum()))
    return max(1, ceil(rate / prefill_round_up_multiple)) * prefill_round_up_multiple


def wants_another_step(
    num_in_flight: int, seconds_queued: float | None, seconds_wanted: float, scheduling_steps_ahead: int
) -> bool:
    """Whether to send one more step when the worker has `num_in_flight` steps.

    seconds_queued: predicted time of the steps behind the running one; None while nothing can be predicted. The running
    step does not count, however long it is: once it ends, only the steps behind it keep the worker busy.
    """
    if num_in_flight < 2:
        return num_in_flight < scheduling_steps_ahead
    return seconds_queued is not None and seconds_queued < seconds_wanted and num_in_flight < scheduling_steps_ahead


def num_steps_to_keep_in_flight(step_seconds: float | None, scheduling_steps_ahead: int) -> int:
    """Steps in flight if each takes `step_seconds`: the running one, and `SECONDS_QUEUED` of work behind it.

    More steps would not make the worker busier: they would compute more tokens for sequences whose eos has not arrived
    yet, and delay a new request's first step. So many short steps of 2 ms are in flight, but only two of 100 ms. There
    are never fewer than two, or the worker would idle during every Engine.step; two also before the first result, when
    step_seconds is None. All of this is limited to `scheduling_steps_ahead`.
    """
    wanted = 2 if step_seconds is None or step_seconds <= 0 else max(2, 1 + ceil(SECONDS_QUEUED / step_seconds))
    return min(wanted, scheduling_steps_ahead)


def choose_victims(
    num_lost: NDArray[np.int64], num_freed: NDArray[np.int64], admitted_at: NDArray[np.int64], num_short: int
) -> NDArray[np.int64]:
    """Which of N sequences to preempt to free `num_short` blocks: indices into the arrays, newest sequence first.

    num_lost: [N] tokens that each would have to recompute. num_freed: [N] blocks that it alone uses, plus the block
    that it would allocate in the next step. admitted_at: [N] order of admission.

    Sequences that lose the fewest tokens are preempted first, the newest first among equals. So the most advanced
    sequence is preempted last, and will finish however short of blocks the others are. If all sequences do not free
    enough, all that free any are preempted.
    """
    order = np.lexsort((-admitted_at, num_lost))
    order = order[num_freed[order] > 0]
    num_needed = int(np.searchsorted(np.cumsum(num_freed[order]), num_short)) + 1
    victims = order[:num_needed]
    return victims[np.argsort(-admitted_at[victims])]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What limits the prompt tokens of a step with several microbatches."""

    pp_size: int
    num_microbatches: int
    """Precondition: at least 2."""
    max_tokens_per_forward: int

    def max_prefill(self, num_decoding: int, num_all_tokens: int) -> int:
        """Most prompt tokens for a step with `num_decoding` decode rows.

        The larger of an equal share of the round and the surplus that idles no stage: a step that is longer than the
        others leaves stages idle before and behind it. num_all_tokens: decode rows, and prompt tokens still to compute,
        of all microbatches.
        """
        num_even = -(-num_all_tokens // self.num_microbatches) - num_decoding
        return min(max(self._spare_tokens(num_decoding), num_even), self.max_tokens_per_forward - num_decoding)

    def _spare_tokens(self, num_decoding: int) -> int:
        """Most prompt tokens that one step of a round may have beyond the others without idling a stage.

        With S stages, M microbatches and steps of a tokens, but one of a + c: a stage computes M * a + c tokens in a
        round, and the longer step takes S * (a + c) to pass all stages. It delays nothing up to c = (M - S) * a /
        (S - 1).
        """
        num_more = self.num_microbatches - self.pp_size
        return max(_MIN_SPARE_TOKENS, num_more * num_decoding // max(1, self.pp_size - 1))

    def prefill_per_round(self, num_decoding: list[int], num_left: list[int]) -> int | None:
        """Expected prompt tokens per round, the mean until all prompts are computed; None if there is no prompt, or if
        decode rows leave no room for any.

        num_decoding, num_left: [M] decode rows, assumed constant, and prompt tokens still to compute.
        """
        left, num_all_left, num_rounds = list(num_left), sum(num_left), 0
        num_all_decoding = sum(num_decoding)
        while (num_now := sum(left)) and num_rounds < _MAX_ROUNDS:
            for index, own_decoding in enumerate(num_decoding):
                num_fitting = max(0, self.max_prefill(own_decoding, num_all_decoding + sum(left)))
                left[index] -= min(left[index], num_fitting)
            if sum(left) == num_now:
                break
            num_rounds += 1
        return -(-(num_all_left - sum(left)) // num_rounds) if num_rounds else None
