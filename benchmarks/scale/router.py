"""What the router's index costs: time of a choice and memory, by the number of replicas."""

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.scale.load import FIRST_ID, VOCABULARY
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.replicas import Replica, choose_replica, hash_prefixes

_NUM_SHARED = 64
"""Prefixes, which the prompts share."""


@dataclass(frozen=True, slots=True)
class RouterCost:
    """With full indexes."""

    num_replicas: int
    choice_us: float
    """CPU time of one choice in microseconds, of a prompt whose prefix most replicas have."""
    index_bytes: int
    """Of one replica's index."""
    num_index_tokens: int
    """Tokens of the prefixes in it."""


def measure(num_replicas: int, limits: EngineLimits, prompt_tokens: int, seed: int = 1) -> RouterCost:
    """Each index is full of prompts of this length, half of each shared with another prompt."""
    rng = np.random.default_rng(seed)

    def request(prefix: int) -> GenerateRequest:
        shared = np.random.default_rng((9, prefix)).integers(FIRST_ID, VOCABULARY, prompt_tokens // 2, dtype=np.int32)
        own = rng.integers(FIRST_ID, VOCABULARY, prompt_tokens - len(shared), dtype=np.int32)
        ids = np.concatenate([shared, own])
        return GenerateRequest("a", ids, 1, 1, SamplingParams(), 1, (), True, False)

    replicas = [Replica(index=index) for index in range(num_replicas)]
    for replica in replicas:
        replica.start(limits)
    num_prompts = 2 * limits.num_kv_blocks * limits.page_size // prompt_tokens
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    _fill(replicas[:1], num_prompts, request)
    index_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    _fill(replicas[1:], num_prompts, request)
    for replica in replicas:
        replica.num_unfinished_sequences = random.Random(replica.index).randrange(16)
    requests = [request(number % _NUM_SHARED) for number in range(200)]
    start_s = time.thread_time()
    for one in requests:
        choose_replica(replicas, one)
    choice_us = (time.thread_time() - start_s) / len(requests) * 1e6
    return RouterCost(num_replicas, choice_us, index_bytes, replicas[0].prefixes.num_tokens)


def _fill(replicas: Sequence[Replica], num_prompts: int, request: Callable[[int], GenerateRequest]) -> None:
    rng = random.Random(1)
    for replica in replicas:
        for _ in range(num_prompts):
            replica.prefixes.add(hash_prefixes(request(rng.randrange(_NUM_SHARED)).prompt_ids, ""))
