"""The manager's CPU time by part, in one process; and two of its parts alone: the simulation and the prefix match."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from benchmarks.manager_load import PAGE_SIZE, VOCAB_SIZE, InlineEngine, Load, engine_options
from tokasaurus.manager.engine.kv_forecast import forecast_kv
from tokasaurus.manager.kv_cache.prefix_tree import PrefixTree
from tokasaurus.manager.state.sequence import make_prompt

MAX_NEW_TOKENS = 1024

HELD_TOKENS_PER_SEQUENCE = 850
"""KV tokens that a running sequence of the load below holds on average: 500 of the prompt, a third of 1,024 tokens
sampled so far (the long ones run longest, and are half done on average), and half of its last block."""

POOL_SLACK = 1.03
FORWARD_SECONDS = 0.02
NUM_STEPS_BEFORE_SIMULATION = 300


def make_load(is_known: bool, mean_prompt_tokens: int = 500, num_samples: int = 1, seed: int = 0) -> Load:
    """Prompts of the mean, give or take a fifth; completions of 1 to 1,024 tokens, every length equally likely."""
    prompt_lengths = range(mean_prompt_tokens * 4 // 5, mean_prompt_tokens * 6 // 5 + 1)
    lengths = range(1, MAX_NEW_TOKENS + 1)
    return Load(prompt_lengths, lengths, None if is_known else MAX_NEW_TOKENS, seed, num_samples)


def num_outstanding(num_sequences: int) -> int:
    """Sequences that run or wait: enough wait for admission to have something to do in every turn."""
    return num_sequences + max(256, num_sequences // 16)


def num_pool_tokens(num_sequences: int, mean_prompt_tokens: int = 500) -> int:
    """A pool in which about `num_sequences` of `make_load` run, and the waiting ones do not fit."""
    return round(POOL_SLACK * num_sequences * (HELD_TOKENS_PER_SEQUENCE + mean_prompt_tokens - 500))


@dataclass(frozen=True, slots=True)
class Shares:
    """One process. us_per_token: CPU time of the manager's part.

    sections: what each section has of it, in the proportion of their wall times, which are what the timers count.

    bytes_per_row: sent to the worker, per decoding sequence and step, prompts and block tables of new sequences
    included. prompt_bytes_per_row: of these, the prompts' tokens. torch_imported: by this process.
    """

    num_sequences: int
    mean_prompt_tokens: int
    is_known: bool
    mean_running: float
    us_per_token: float
    us_per_turn: float
    sections: dict[str, float]
    bytes_per_row: float
    prompt_bytes_per_row: float
    preemptions: int
    torch_imported: bool


def measure_shares(
    num_sequences: int,
    is_known: bool,
    num_warm_steps: int,
    num_steps: int,
    advance: Callable[[], None],
    mean_prompt_tokens: int = 500,
) -> Shares:
    """`num_sequences` run, a turn per step; measured for `num_steps` after `num_warm_steps`. advance: after each."""
    engine = InlineEngine(
        engine_options(num_pool_tokens(num_sequences, mean_prompt_tokens)),
        make_load(is_known, mean_prompt_tokens),
        FORWARD_SECONDS,
    )
    num_new = num_outstanding(num_sequences)
    for _ in range(num_warm_steps):
        num_new = engine.turn(num_new)
        advance()
    before, preemptions = engine.counts, engine.state.totals.preemptions
    for _ in range(num_steps):
        num_new = engine.turn(num_new)
        advance()
    counts = engine.counts.since(before)
    us_per_token = counts.cpu_s * 1e6 / counts.num_generated_tokens
    sections_s = sum(counts.section_s.values())
    return Shares(
        num_sequences=num_sequences,
        mean_prompt_tokens=mean_prompt_tokens,
        is_known=is_known,
        mean_running=counts.sum_running / counts.num_steps_deferred,
        us_per_token=us_per_token,
        us_per_turn=counts.cpu_s * 1e6 / counts.num_steps_deferred,
        sections={name: us_per_token * seconds / sections_s for name, seconds in counts.section_s.items()},
        bytes_per_row=counts.num_bytes_sent / counts.num_decode_tokens,
        prompt_bytes_per_row=counts.num_prompt_bytes_sent / counts.num_decode_tokens,
        preemptions=engine.state.totals.preemptions - preemptions,
        torch_imported="torch" in sys.modules,
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of `num_calls` calls of one thing."""

    name: str
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
    """One look at the whole future of `num_sequences` that run, those that still prefill among them."""
    timings = []
    for num_samples in (1, 16):
        load = make_load(is_known=False, num_samples=num_samples)
        # Twice the pool that they need: all are admitted without being simulated, as fast as they come.
        engine = InlineEngine(engine_options(2 * num_pool_tokens(num_sequences)), load, FORWARD_SECONDS)
        num_open = 0
        for step in count():
            num_missing = num_sequences - num_open
            num_open += num_missing // num_samples * num_samples - engine.turn(num_missing // num_samples)
            advance()
            if step >= NUM_STEPS_BEFORE_SIMULATION and not engine.state.queues.num_waiting:
                break
        name = f"{engine.state.num_running} sequences, " + (
            "no prompt shared" if num_samples == 1 else "16 of a prompt"
        )
        timings.append(_timing(name, [partial(forecast_kv, engine.state, None)] * num_calls))
    return timings


def measure_prefix_match(num_blocks: int, num_tokens: int, num_calls: int, seed: int = 0) -> list[Timing]:
    """Find a prompt of `num_tokens`, all of it cached, in a tree of `num_blocks` blocks of such prompts."""
    rng = np.random.default_rng(seed)
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
