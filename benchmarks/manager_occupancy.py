"""How full a small KV cache is kept where sequences end early at random, against a manager that knows all lengths."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.manager_load import InlineEngine, Load, engine_options
from benchmarks.workloads import lognormal_lengths

ANSWER_LENGTHS = Path(__file__).parent / "data" / "gsm8k_answer_lengths.json"
MAX_NEW_TOKENS = 1024
PROMPT_LENGTHS = range(150, 251)
SHARE_OF_WORST_CASE = 0.1
FORWARD_SECONDS = 0.010
MAX_TOKENS_PER_FORWARD = 8192


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One run. Means are over steps, until no request is left to send: the tail in which the batch empties is left out.

    mean_running_warm: without the start, until as many sequences have finished as want to run at once.
    preempted_share: tokens that were computed again after a preemption, of all tokens computed.
    """

    num_steps: int
    mean_running: float
    mean_running_warm: float
    num_preemptions: int
    preempted_share: float


@dataclass(frozen=True, slots=True)
class OccupancyResult:
    """The same requests run with lengths predicted and with lengths known. ratio: of mean_running, or of
    mean_running_warm where that is smaller."""

    lengths: str
    num_sequences: int
    num_wanted: int
    num_kv_tokens: int
    mean_length: float
    predicted: Occupancy
    known: Occupancy
    ratio: float


def completion_lengths(name: str, seed: int) -> list[int]:
    """ "gsm8k": real answers; "lognormal": mean 200, sigma 1, up to MAX_NEW_TOKENS."""
    if name == "lognormal":
        return lognormal_lengths(4096, 200, 1.0, MAX_NEW_TOKENS, seed)
    lengths: list[int] = json.loads(ANSWER_LENGTHS.read_text())["num_tokens"]
    return lengths


def run(
    lengths: Sequence[int],
    is_known: bool,
    num_wanted: int,
    num_kv_tokens: int,
    num_sequences: int,
    seed: int,
    advance: Callable[[], None],
) -> Occupancy:
    """`num_wanted` sequences run or wait at any time, until `num_sequences` have been sent."""
    # Whether tasks are deferred depends on how fast this machine is; the run must not.
    options = engine_options(num_kv_tokens, num_wanted, MAX_TOKENS_PER_FORWARD, deferred_tasks="always")
    load = Load(PROMPT_LENGTHS, lengths, None if is_known else MAX_NEW_TOKENS, seed)
    engine = InlineEngine(options, load, FORWARD_SECONDS)
    num_new, warm = num_wanted, None
    while load.num_requests < num_sequences:
        num_new = engine.turn(min(num_new, num_sequences - load.num_requests))
        advance()
        if warm is None and engine.counts.num_finished >= num_wanted:
            warm = engine.counts
    counts = engine.counts
    later = counts.since(warm) if warm is not None else counts
    while not engine.is_idle:
        engine.turn(0)
        advance()
    end, totals = engine.counts, engine.state.totals
    assert end.num_finished == num_sequences
    return Occupancy(
        num_steps=end.num_steps_deferred,
        mean_running=counts.sum_running / counts.num_steps_deferred,
        mean_running_warm=later.sum_running / later.num_steps_deferred,
        num_preemptions=totals.preemptions,
        preempted_share=totals.tokens.recomputed / (end.num_prefill_tokens + end.num_decode_tokens),
    )


def measure_occupancy(
    name: str, num_wanted: int, num_sequences: int, seed: int, advance: Callable[[], None]
) -> OccupancyResult:
    """advance: called after each step."""
    lengths = completion_lengths(name, seed)
    worst_case = (sum(PROMPT_LENGTHS) / len(PROMPT_LENGTHS) + MAX_NEW_TOKENS) * num_wanted
    num_kv_tokens = round(SHARE_OF_WORST_CASE * worst_case)
    predicted, known = (
        run(lengths, is_known, num_wanted, num_kv_tokens, num_sequences, seed, advance) for is_known in (False, True)
    )
    return OccupancyResult(
        lengths=name,
        num_sequences=num_sequences,
        num_wanted=num_wanted,
        num_kv_tokens=num_kv_tokens,
        mean_length=sum(lengths) / len(lengths),
        predicted=predicted,
        known=known,
        ratio=min(
            predicted.mean_running / known.mean_running,
            predicted.mean_running_warm / known.mean_running_warm,
        ),
    )
