"""A run's figures."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.load import HEAVY
from benchmarks.scale.simulation import Answer, Run

_WINDOW_S = 0.25
_RECOVERED = 0.95


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_per_s: float
    """Generated, of all replicas, while the middle 60 % of the answers ended."""
    cached_share: float
    """Of the prompts' tokens."""
    best_share: float
    """The same if every prefix that was asked before were found."""
    busy_share: float
    """Of the devices' time."""
    busiest: float
    """Tokens of the replica that generated most, over the mean of all."""
    median_s: float
    p99_s: float
    """Of the times of answers."""
    light_over_heavy: float
    """Median time of answers of clients with one session over that of the client with half of all sessions."""
    routing_us: float
    """CPU time of a choice of a replica, in microseconds."""
    num_again: int
    """Requests that were run again after a death."""
    slowest_again_s: float
    """Longest time from the death until the answer to a request that it hit; 0 without one."""
    recovered_s: float
    """From the death until as many tokens per second come as 95 % of those before; inf if that is not reached."""
    updated_s: float
    """Time of the rolling update; 0 without one."""


def figures_of(run: Run) -> Figures:
    ended = sorted(run.answers, key=lambda answer: answer.ended_s)
    first, last = ended[len(ended) // 5], ended[4 * len(ended) // 5]
    middle = [answer for answer in ended if first.ended_s < answer.ended_s <= last.ended_s]
    asked = sum(len(answer.request.prompt_ids) for answer in run.answers)
    times = sorted(answer.ended_s - answer.sent_s for answer in run.answers)
    again = [answer for answer in run.answers if answer.num_runs > 1]
    died_s = run.died_s
    begun_s, done_s = run.updated_s or (0.0, 0.0)
    return Figures(
        tokens_per_s=sum(answer.num_tokens for answer in middle) / max(last.ended_s - first.ended_s, 1e-9),
        cached_share=sum(answer.num_cached_tokens for answer in run.answers) / asked,
        best_share=_findable_tokens(run.answers) / asked,
        busy_share=run.busy_s / run.ended_s / len(run.tokens_of_replicas),
        busiest=max(run.tokens_of_replicas) / statistics.fmean(run.tokens_of_replicas),
        median_s=statistics.median(times),
        p99_s=times[math.ceil(0.99 * len(times)) - 1],
        light_over_heavy=_median_time(run.answers, is_heavy=False) / _median_time(run.answers, is_heavy=True),
        routing_us=run.routing_s / len(run.answers) * 1e6,
        num_again=len(again),
        slowest_again_s=max((answer.ended_s - died_s for answer in again), default=0.0) if died_s is not None else 0.0,
        recovered_s=0.0 if died_s is None else _recovered_s(run.answers, died_s),
        updated_s=done_s - begun_s,
    )


def _findable_tokens(answers: Sequence[Answer]) -> int:
    seen: set[int] = set()
    found = 0
    for answer in answers:
        found += answer.request.prefix_tokens if answer.request.prefix in seen else 0
        seen.add(answer.request.prefix)
    return found


def _median_time(answers: Sequence[Answer], is_heavy: bool) -> float:
    return statistics.median(
        answer.ended_s - answer.sent_s for answer in answers if (answer.request.client == HEAVY) is is_heavy
    )


def _recovered_s(answers: Sequence[Answer], died_s: float) -> float:
    def speed(from_s: float) -> float:
        return sum(answer.num_tokens for answer in answers if from_s < answer.ended_s <= from_s + _WINDOW_S) / _WINDOW_S

    before = sum(answer.num_tokens for answer in answers if died_s / 2 < answer.ended_s <= died_s) / (died_s / 2)
    ended_s = max(answer.ended_s for answer in answers)
    for number in range(math.floor((ended_s - died_s) / _WINDOW_S)):
        if speed(died_s + number * _WINDOW_S) >= _RECOVERED * before:
            return number * _WINDOW_S
    return math.inf
