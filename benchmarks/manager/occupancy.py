"""How full the manager keeps a small KV cache if it must predict completion lengths, and if it knows them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.manager.load import InlineEngine, Load, engine_options
from tokasaurus.commands.bench.workloads import lognormal_lengths

ANSWER_LENGTHS = Path(__file__).parents[1] / "data" / "gsm8k_answer_lengths.json"
MAX_NEW_TOKENS = 1024
PROMPT_LENGTHS = range(150, 251)
SHARE_OF_WORST_CASE = 0.1
FORWARD_SECONDS = 0.010
MAX_TOKENS_PER_FORWARD = 8192


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Figures of one run. Means exclude the tail, in which no request is left to send and the batch empties."""

    num_steps: int
    mean_running: float
    """Running sequences, mean over steps."""
    mean_running_warm: float
    """As `mean_running`, without the start: the steps until `num_wanted` sequences have finished."""
    num_preemptions: int
    preempted_share: float
    """Tokens computed again after a preemption, as a share of all computed tokens."""


@dataclass(frozen=True, slots=True)
class OccupancyResult:
    """The same completions, run with predicted lengths and with known lengths."""

    lengths: str
    """Distribution of completion lengths: "gsm8k" or "lognormal"."""
    num_sequences: int
    """Sequences in all."""
    num_wanted: int
    """Sequences that run or wait at a time."""
    num_kv_tokens: int
    """Size of the KV cache, in tokens."""
    mean_length: float
    """Mean completion length, in tokens."""
    predicted: Occupancy
    """Every request has the same max_tokens; the length predictor expects shorter completions."""
    known: Occupancy
    """max_tokens of each request is its length."""
    ratio: float
    """Predicted over known: the smaller of the ratios of mean_running and of mean_running_warm."""


def completion_lengths(name: str, seed: int) -> list[int]:
    """Completion lengths in tokens. "gsm8k": of real answers; "lognormal": mean 200, sigma 1, cap MAX_NEW_TOKENS."""
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
    """Simulate a run in which `num_wanted` sequences run or wait at any time, until `num_sequences` have been sent.

    advance: called after each step."""
    # By default the machine's speed decides whether a task is deferred, and the result must not depend on it.
    options = engine_options(num_kv_tokens, num_wanted, MAX_TOKENS_PER_FORWARD, deferred_tasks="always")
    load = Load(PROMPT_LENGTHS, lengths, None if is_known else MAX_NEW_TOKENS, seed)
    engine = InlineEngine(options, load, FORWARD_SECONDS)
    num_new, warm = num_wanted, None
    while load.num_requests < num_sequences:
        num_new = engine.step(min(num_new, num_sequences - load.num_requests))
        advance()
        if warm is None and engine.counts.num_finished >= num_wanted:
            warm = engine.counts
    counts = engine.counts
    later = counts.since(warm) if warm is not None else counts
    while not engine.is_idle:
        engine.step(0)
        advance()
    end, totals = engine.counts, engine.state.totals
    assert end.num_finished == num_sequences
    return Occupancy(
        num_steps=end.num_steps,
        mean_running=counts.sum_running / counts.num_steps,
        mean_running_warm=later.sum_running / later.num_steps,
        num_preemptions=totals.preemptions,
        preempted_share=totals.tokens.recomputed / (end.num_prefill_tokens + end.num_decode_tokens),
    )


def measure_occupancy(
    name: str, num_wanted: int, num_sequences: int, seed: int, advance: Callable[[], None]
) -> OccupancyResult:
    """Run the same completions with predicted and with known lengths. advance: called after each step."""
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
