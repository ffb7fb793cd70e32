"""Finished sequences, their deltas, and the stream events made from them."""

import itertools
import random
from typing import Any

import numpy as np
import orjson

from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.server.engine_client.collectors import FinishedSequence


def make_request(
    num_prompt_tokens: int = 3,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    want_logprobs: bool = False,
    num_sequences: int = 1,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="cmpl-1-0",
        prompt_ids=np.zeros(num_prompt_tokens, dtype=np.int32),
        num_sequences=num_sequences,
        max_new_tokens=100,
        sampling=SamplingParams(),
        seed=0,
        stop_strings=stop,
        ignore_eos=ignore_eos,
        want_logprobs=want_logprobs,
    )


def parse(events: bytes) -> list[dict[str, Any]]:
    """Parses server-sent events, after asserting that each is well formed."""
    assert events.endswith(b"\n\n") or not events
    lines = events.split(b"\n\n")[:-1]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


def cut_into_deltas(sequence: FinishedSequence, index: int, rng: random.Random) -> list[SequenceDelta]:
    num_tokens = len(sequence.token_ids)
    inner = sorted(rng.choices(range(num_tokens), k=rng.randint(0, num_tokens)))  # some empty deltas
    assert sequence.logprobs is not None
    return [
        SequenceDelta(
            request_id="r",
            sequence_index=index,
            token_ids=sequence.token_ids[start:end],
            logprobs=sequence.logprobs[start:end],
            finish_reason=sequence.finish_reason if end == num_tokens else None,
            num_cached_tokens=sequence.num_cached_tokens,
            num_computed_tokens=3,
            num_recomputed_tokens=0,
            num_shared_tokens=0,
            prompt_logprobs=sequence.prompt_logprobs if number == 0 else None,
        )
        for number, (start, end) in enumerate(itertools.pairwise([0, *inner, num_tokens]))
    ]


def finished(token_ids: list[int], finish_reason: FinishReason) -> FinishedSequence:
    logprobs = [-float(position) for position in range(len(token_ids))]
    return FinishedSequence(token_ids, logprobs, finish_reason, num_cached_tokens=1, num_computed_tokens=3)


def interleaved(rows: list[list[FinishedSequence]], rng: random.Random) -> list[list[tuple[int, SequenceDelta]]]:
    """(row index, delta) of all sequences, in groups that are read together; each sequence's deltas stay in order."""
    queues = [
        [(request_index, delta) for delta in cut_into_deltas(sequence, index, rng)]
        for request_index, row in enumerate(rows)
        for index, sequence in enumerate(row)
    ]
    groups: list[list[tuple[int, SequenceDelta]]] = []
    while queues := [queue for queue in queues if queue]:
        groups.append([queue.pop(0) for queue in rng.sample(queues, rng.randint(1, len(queues)))])
    return groups
