"""Usage added up delta by delta, compared with sums over everything that has arrived."""

import random

import pytest

from tests.helpers.examples import seeds
from tests.server.helpers.finished_sequences import make_request
from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import PromptTokensDetails, Usage
from tokasaurus.server.respond.choice import UsageCounter


def sum_up(rows: list[list[FinishedSequence]], prompt_tokens: int) -> Usage:
    """A sequence of which nothing has arrived has zeros."""
    sequences = [sequence for row in rows for sequence in row]
    completion_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    details = PromptTokensDetails(
        cached_tokens=sum(min(sequence.num_cached_tokens for sequence in row) for row in rows),
        computed_tokens=sum(sequence.num_computed_tokens for sequence in sequences),
        shared_tokens=sum(sequence.num_shared_tokens for sequence in sequences),
        recomputed_tokens=sum(sequence.num_recomputed_tokens for sequence in sequences),
    )
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


@pytest.mark.parametrize("seed", seeds(20))
def test_usage_after_each_delta_is_the_sum_of_what_has_arrived(seed: int) -> None:
    rng = random.Random(seed)
    requests = [make_request(rng.randint(1, 9), num_sequences=rng.randint(1, 3)) for _ in range(3)]
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    rows = [[FinishedSequence() for _ in range(request.num_sequences)] for request in requests]
    counter = UsageCounter(Prepared("cmpl-1", requests))
    open_sequences = [(row, index) for row, request in enumerate(requests) for index in range(request.num_sequences)]
    cached = {key: rng.randint(0, 5) for key in open_sequences}
    while open_sequences:
        key = rng.choice(open_sequences)
        row, index = key
        before, is_last = rows[row][index], rng.random() < 0.3
        delta = SequenceDelta(
            "r",
            index,
            [1] * rng.randint(0, 3),
            None,
            "stop" if is_last else None,
            cached[key],
            before.num_computed_tokens + rng.randint(0, 4),
            before.num_recomputed_tokens + rng.randint(0, 4),
            before.num_shared_tokens + rng.randint(0, 4),
        )
        if is_last:
            open_sequences.remove(key)
        before.append(delta)
        counter.add(row, index, delta)
        assert counter.usage() == sum_up(rows, prompt_tokens)
