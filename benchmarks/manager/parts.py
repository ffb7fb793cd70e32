"""The manager's CPU time by part, in one process, and the time of a KV simulation and of a prefix match."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from benchmarks.manager.load import PAGE_SIZE, VOCAB_SIZE, InlineEngine, Load, engine_options
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.kv_cache.prefix_tree import PrefixTree
from tokasaurus.manager.state.sequence import make_prompt

MAX_NEW_TOKENS = 1024

KV_TOKENS_PER_SEQUENCE = 850
"""KV tokens of a running sequence of `make_load`, on average: 500 of the prompt, a third of 1,024 sampled so far (long
completions run longest, and are half done on average), and half a block."""

POOL_SLACK = 1.03
FORWARD_SECONDS = 0.02
NUM_STEPS_BEFORE_SIMULATION = 300


def make_load(is_known: bool, mean_prompt_tokens: int = 500, num_samples: int = 1, seed: int = 0) -> Load:
    """Prompts of the mean length, plus or minus up to a fifth; completions of 1 to 1,024 tokens, equally likely."""
    prompt_lengths = range(mean_prompt_tokens * 4 // 5, mean_prompt_tokens * 6 // 5 + 1)
    lengths = range(1, MAX_NEW_TOKENS + 1)
    return Load(prompt_lengths, lengths, None if is_known else MAX_NEW_TOKENS, seed, num_samples)


def num_outstanding(num_sequences: int) -> int:
    """Sequences that run or wait: enough of them wait that admission has work in every step."""
    return num_sequences + max(256, num_sequences // 16)


def num_pool_tokens(num_sequences: int, mean_prompt_tokens: int = 500) -> int:
    """KV cache size, in tokens, that fits about `num_sequences` running sequences of `make_load` and no more."""
    return round(POOL_SLACK * num_sequences * (KV_TOKENS_PER_SEQUENCE + mean_prompt_tokens - 500))


@dataclass(frozen=True, slots=True)
class Shares:
    """The manager's CPU time by section, with manager and worker in one process."""

    num_sequences: int
    """Running sequences, as asked for."""
    mean_prompt_tokens: int
    is_known: bool
    """Whether max_tokens of each request is its length; otherwise eos ends it at random."""
    mean_running: float
    """Running sequences, mean over steps."""
    us_per_token: float
    """CPU microseconds of the manager per generated token."""
    us_per_step: float
    """CPU microseconds of the manager per step."""
    sections: dict[str, float]
    """Microseconds of `us_per_token` by section, in proportion to the wall times that the section timers count."""
    bytes_per_row: float
    """Bytes sent to the worker per decode row, prompts and block tables of new sequences included."""
    prompt_bytes_per_row: float
    """Bytes of prompt tokens in `bytes_per_row`."""
    preemptions: int
    torch_imported: bool
    """Whether this process has imported torch."""


def measure_shares(
    num_sequences: int,
    is_known: bool,
    num_warm_steps: int,
    num_steps: int,
    advance: Callable[[], None],
    mean_prompt_tokens: int = 500,
) -> Shares:
    """Run about `num_sequences` for `num_warm_steps`, then measure `num_steps`. advance: called after each step."""
    engine = InlineEngine(
        engine_options(num_pool_tokens(num_sequences, mean_prompt_tokens)),
        make_load(is_known, mean_prompt_tokens),
        FORWARD_SECONDS,
    )
    num_new = num_outstanding(num_sequences)
    for _ in range(num_warm_steps):
        num_new = engine.step(num_new)
        advance()
    before, preemptions = engine.counts, engine.state.totals.preemptions
    for _ in range(num_steps):
        num_new = engine.step(num_new)
        advance()
    counts = engine.counts.since(before)
    us_per_token = counts.cpu_s * 1e6 / counts.num_generated_tokens
    sections_s = sum(counts.section_s.values())
    return Shares(
        num_sequences=num_sequences,
        mean_prompt_tokens=mean_prompt_tokens,
        is_known=is_known,
        mean_running=counts.sum_running / counts.num_steps,
        us_per_token=us_per_token,
        us_per_step=counts.cpu_s * 1e6 / counts.num_steps,
        sections={name: us_per_token * seconds / sections_s for name, seconds in counts.section_s.items()},
        bytes_per_row=counts.num_bytes_sent / counts.num_decode_tokens,
        prompt_bytes_per_row=counts.num_prompt_bytes_sent / counts.num_decode_tokens,
        preemptions=engine.state.totals.preemptions - preemptions,
        torch_imported="torch" in sys.modules,
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of `num_calls` equal calls, in milliseconds."""

    name: str
    """What was called, for people."""
    median_ms: float
    slowest_ms: float
    num_calls: int


def _timing(name: str, calls: Sequence[Callable[[], object]]) -> Timing:
    times_s = []
    for call in calls:
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return Timing(name, statistics.median(times_s) * 1e3, max(times_s) * 1e3, len(times_s))


def measure_simulation(num_sequences: int, num_calls: int, advance: Callable[[], None]) -> list[Timing]:
    """Time one KV simulation of all steps until `num_sequences` running sequences end; some of them are in prefill."""
    timings = []
    for num_samples in (1, 16):
        load = make_load(is_known=False, num_samples=num_samples)
        # Twice the KV cache that they need: all are admitted as they arrive, without a KV simulation.
        engine = InlineEngine(engine_options(2 * num_pool_tokens(num_sequences)), load, FORWARD_SECONDS)
        num_open = 0
        for step in count():
            num_missing = num_sequences - num_open
            num_open += num_missing // num_samples * num_samples - engine.step(num_missing // num_samples)
            advance()
            if step >= NUM_STEPS_BEFORE_SIMULATION and not engine.state.queues.num_waiting:
                break
        name = f"{engine.state.slots.num_running} sequences, " + (
            "no prompt shared" if num_samples == 1 else "16 per prompt"
        )
        timings.append(_timing(name, [partial(forecast_kv, engine.state, None)] * num_calls))
    return timings


def measure_prefix_match(num_blocks: int, num_tokens: int, num_calls: int) -> list[Timing]:
    """Time the match of a fully cached prompt of `num_tokens` in a prefix tree of `num_blocks` blocks."""
    rng = np.random.default_rng(0)
    blocks_per_prompt = num_tokens // PAGE_SIZE
    timings = []
    for name, blocks_per_node in (("long nodes", blocks_per_prompt), ("nodes of one block", 1)):
        tree = PrefixTree(PAGE_SIZE)
        prompts = []
        for first_block in range(0, num_blocks - blocks_per_prompt + 1, blocks_per_prompt):
            prompt = make_prompt(rng.integers(1, VOCAB_SIZE, num_tokens, dtype=np.int32))
            node = tree.root
            for start in range(0, blocks_per_prompt, blocks_per_node):
                end = start + blocks_per_node
                token_bytes = prompt.token_ids[start * PAGE_SIZE : end * PAGE_SIZE].tobytes()
                node = tree.insert(node, token_bytes, np.arange(first_block + start, first_block + end, dtype=np.int32))
            prompts.append(prompt)
        chosen = [prompts[index] for index in rng.integers(len(prompts), size=num_calls)]
        assert all(tree.match(prompt.token_bytes).num_blocks == blocks_per_prompt for prompt in chosen)
        calls = [partial(_match, tree, prompt.token_ids) for prompt in chosen]
        timings.append(_timing(f"{num_tokens} tokens among {tree.num_blocks} blocks, {name}", calls))
    return timings


def _match(tree: PrefixTree, token_ids: NDArray[np.int32]) -> None:
    tree.match(make_prompt(token_ids).token_bytes)
