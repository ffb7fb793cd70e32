"""Which bodies are accepted, against an oracle that recounts a plain list of all unfinished requests."""

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.server.helpers.client_driver import make_request
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.engine_client.limits import NO_LIMITS, QueueLimits, UnfinishedWork
from tokasaurus.server.errors import ApiError


@dataclass
class Unfinished:
    request: GenerateRequest
    num_unfinished: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids)


def expected_status(limits: QueueLimits, work: list[Unfinished], new: GenerateRequest, num_running: int) -> int:
    clients = {one.request.client for one in work} | {new.client}
    sequences, tokens = Counter(), Counter()
    for one in work:
        sequences[one.request.client] += one.num_unfinished
        tokens[one.request.client] += one.num_tokens

    def fits(limit: int | None, counts: Counter[str], num_new: int) -> bool:
        if limit is None or counts.total() + num_new <= limit:
            return True
        return Fraction(counts[new.client] + num_new) <= Fraction(limit, len(clients))

    if limits.max_queued_sequences is not None and new.num_sequences > limits.max_queued_sequences:
        return 400
    if limits.max_queued_tokens is not None and len(new.prompt_ids) > limits.max_queued_tokens:
        return 400
    is_full = limits.max_queued_requests is not None and sequences.total() - num_running >= limits.max_queued_requests
    # the client's share must leave room for one sequence; the body may have more
    if is_full and Fraction(sequences[new.client] + 1) > Fraction(limits.max_queued_requests or 0, len(clients)):
        return 429
    is_accepted = fits(limits.max_queued_sequences, sequences, new.num_sequences) and fits(
        limits.max_queued_tokens, tokens, len(new.prompt_ids)
    )
    return 200 if is_accepted else 429


def status_of(work: UnfinishedWork, new: GenerateRequest, num_running: int) -> int:
    try:
        work.check(new.client, new.num_sequences, len(new.prompt_ids), num_running)
    except ApiError as error:
        return error.status
    return 200


limit_strategy = st.one_of(st.none(), st.integers(1, 12))
operation_strategy = st.tuples(
    st.sampled_from(["submit", "submit", "submit", "finish", "end"]),
    st.sampled_from("abcd"),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 3),
)


@examples(300)
@given(
    st.builds(QueueLimits, limit_strategy, limit_strategy, limit_strategy), st.lists(operation_strategy, max_size=40)
)
def test_bodies_are_accepted_as_by_recounting_all_unfinished_requests(limits: QueueLimits, operations) -> None:
    work, unfinished, num_running = UnfinishedWork(limits), [], 0
    for number, (name, client, first, second, num_running) in enumerate(operations):
        if name == "submit":
            request = replace(make_request(f"r{number}", [0] * first, second), client=client)
            status = status_of(work, request, num_running)
            assert status == expected_status(limits, unfinished, request, num_running)
            if status == 200:
                work.add(request.client, 1, request.num_sequences, len(request.prompt_ids))
                unfinished.append(Unfinished(request, second))
        elif unfinished:
            one = unfinished[first % len(unfinished)]
            if name == "finish" and one.num_unfinished:
                work.finish_sequence(one.request)
                one.num_unfinished -= 1
            elif name == "end":
                work.remove(one.request, one.num_unfinished)
                unfinished.remove(one)
    for one in unfinished:
        work.remove(one.request, one.num_unfinished)
    assert work == UnfinishedWork(limits)


@pytest.mark.parametrize("num_clients", [1, 2, 7, 50])
def test_clients_that_ask_for_all_they_can_get_exceed_a_limit_by_a_harmonic_factor(num_clients: int) -> None:
    work, limit = UnfinishedWork(replace(NO_LIMITS, max_queued_sequences=60)), 60
    total = 0
    for number in range(num_clients):
        request = replace(make_request(f"r{number}", [0]), client=f"{number}")
        while status_of(work, request, 0) == 200:
            work.add(request.client, 1, request.num_sequences, len(request.prompt_ids))
            total += 1
    assert total == sum(limit // count for count in range(1, num_clients + 1))
    assert status_of(work, replace(request, client="late"), 0) == (200 if num_clients < limit else 429)
