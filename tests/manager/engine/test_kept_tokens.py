"""Requests that an engine was stopped in, and that another engine continues with the tokens that were kept."""

import random
from dataclasses import replace

import numpy as np

from tests.helpers.examples import IS_NIGHTLY
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.fake_grammars import BY_GRAMMAR, LANGUAGES, TOKEN_BYTES, fake_vocabulary
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tests.manager.helpers.simulation import most_likely, simulate
from tokasaurus.messages.commands import AbortRequests
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta

SHAPES = [
    Shape(0, 20, 2, 2, 24),
    Shape(1, 9, 0, 1, 40, ("a", "cab")),
    Shape(0, 6, 3, 3, 19, ("abc", "é"), ignore_eos=False, min_tokens=6),
    Shape(-1, 40, 3, 2, 30, want_logprobs=True, stop_token_ids=(9, 2, 5)),
]


def stop(driver: EngineDriver, requests: list[GenerateRequest], only_waiting: bool = False) -> None:
    """The engine has returned what all of these requests have, so that no step runs any more."""
    num_before = len(driver.done)
    driver.step([AbortRequests(1, tuple(request.request_id for request in requests), only_waiting)])
    for _ in range(500):
        if len(driver.done) > num_before:
            return
        driver.step(num_results=1)
    raise AssertionError("the command was not done")


def continued(requests: list[GenerateRequest], deltas: list[SequenceDelta]) -> list[GenerateRequest]:
    """Those that have not finished, as a server would submit them again. deltas: the last ones of all sequences."""
    found = []
    for request in requests:
        own = [delta for delta in deltas if delta.request_id == request.request_id]
        assert len(own) == request.num_sequences
        if any(delta.finish_reason == "abort" for delta in own):
            kept = [
                replace(delta, finish_reason=None if delta.finish_reason == "abort" else delta.finish_reason)
                for delta in own
                if delta.token_ids
            ]
            found.append(replace(request, kept=tuple(kept)))
    return found


def check(request: GenerateRequest, delta: SequenceDelta) -> None:
    """A delta has all tokens of its sequence, or the first ones if it was aborted."""
    token_ids, logprobs, reason = simulate(request, delta.sequence_index)
    if delta.finish_reason == "abort":
        token_ids, logprobs = token_ids[: len(delta.token_ids)], logprobs[: len(delta.token_ids)]
    else:
        assert delta.finish_reason == reason
    assert delta.token_ids == token_ids
    assert delta.logprobs == (logprobs if request.want_logprobs else None)
    assert not delta.error
    if request.num_top_logprobs:
        assert delta.top is not None
        top = most_likely(token_ids, logprobs, request.num_top_logprobs)
        assert np.array_equal(delta.top.token_ids, top.token_ids)
        assert np.array_equal(delta.top.logprobs, top.logprobs)


def run_over_several_engines(rng: random.Random) -> int:
    """Number of sequences that had ended when their request was continued."""
    shapes = [replace(rng.choice(SHAPES), grammar=rng.choice(["", *BY_GRAMMAR])) for _ in range(12)]
    requests = [
        replace(request, num_top_logprobs=2 if request.want_logprobs else 0)
        for request in make_requests(shapes, make_options(40).limits)
    ]
    left, num_sampled, num_cut, num_kept_ends = requests, 0, 0, 0
    finished: dict[tuple[str, int], SequenceDelta] = {}
    while left:
        driver = EngineDriver(make_options(40, max_seqs_per_forward=6), rng=rng, vocabulary=fake_vocabulary())
        num_kept = sum(request.num_kept_tokens for request in left)
        driver.step(left)
        for _ in range(rng.randint(5, 30)):
            driver.step(num_results=rng.randint(0, 2))
        stop(driver, left)
        for delta in driver.deltas:
            check(next(request for request in left if request.request_id == delta.request_id), delta)
            finished[delta.request_id, delta.sequence_index] = delta
        num_returned = sum(len(delta.token_ids) for delta in driver.deltas)
        num_new = driver.state.stats().total_generation_tokens
        assert num_new == num_returned - num_kept, "kept tokens are not sampled again"
        num_sampled += num_new
        driver.run_until_idle()  # steps that were in flight
        driver.assert_nothing_is_left()
        left = continued(left, driver.deltas)
        num_cut += len(left)
        num_kept_ends += sum(delta.finish_reason is not None for request in left for delta in request.kept)
    assert len(finished) == sum(request.num_sequences for request in requests)
    assert num_sampled == sum(len(delta.token_ids) for delta in finished.values())
    assert num_cut > 2
    return num_kept_ends


def test_requests_over_several_engines_have_the_tokens_of_one_and_none_is_sampled_twice() -> None:
    num_kept_ends = sum(run_over_several_engines(random.Random(seed)) for seed in range(100 if IS_NIGHTLY else 12))
    assert num_kept_ends > 10


def test_counts_of_cached_tokens_are_of_the_first_start_and_the_rest_is_computed_again() -> None:
    first, second = (EngineDriver(make_options(60)) for _ in range(2))
    before, request = make_request(0, 13), make_request(0, 13, max_new_tokens=30, ignore_eos=True)
    first.step([replace(before, request_id="before")])
    first.run_until_idle()
    first.step([request])
    while first.state.totals.generation_tokens < 20:
        first.step(num_results=1)
    stop(first, [request])
    (again,) = continued([request], first.deltas[1:])
    second.step([again])
    second.run_until_idle()
    (delta,) = second.deltas
    assert delta.num_cached_tokens == 12
    assert delta.num_computed_tokens == 1
    num_known = 13 + again.num_kept_tokens
    assert delta.num_recomputed_tokens == num_known - 1
    stats = second.state.stats()
    assert stats.total_prefix_cache_hit_tokens == stats.total_computed_prompt_tokens == 0


def test_tokens_that_do_not_follow_the_grammar_are_an_error_of_their_request_alone() -> None:
    driver = EngineDriver(make_options(60), vocabulary=fake_vocabulary())
    language = LANGUAGES[1]
    assert not language.may_begin(TOKEN_BYTES[1] + TOKEN_BYTES[-1])
    request = replace(make_request(0), grammar=language.grammar)
    delta = SequenceDelta("r0", 0, [1, len(TOKEN_BYTES) - 1], None, None, 0, 0, 0, 0)
    driver.step([replace(request, kept=(delta,)), make_request(1)])
    driver.run_until_idle()
    ends = {delta.request_id: delta for delta in driver.deltas}
    assert ends["r0"].error_code == "grammar_too_complex"
    check(make_request(1), ends["r1"])
    driver.assert_nothing_is_left()


def test_requests_of_a_body_whose_sequences_have_all_ended_return_them() -> None:
    """A body with several prompts has a request for each; only one of them may have been cut."""
    first, second = (EngineDriver(make_options(60), vocabulary=fake_vocabulary()) for _ in range(2))
    plain = make_request(0, 7, 2, 5, want_logprobs=True)
    requests = [plain, replace(make_request(1, 7, 2), grammar=LANGUAGES[1].grammar)]
    first.step(requests)
    first.run_until_idle()
    ends = {(delta.request_id, delta.sequence_index): delta for delta in first.deltas}
    kept = [tuple(delta for delta in first.deltas if delta.request_id == one.request_id) for one in requests]
    second.step([replace(one, kept=own) for one, own in zip(requests, kept, strict=True)])
    second.run_until_idle()
    assert len(second.deltas) == len(ends) == 4
    for delta in second.deltas:
        expected = ends[delta.request_id, delta.sequence_index]
        assert (delta.token_ids, delta.logprobs) == (expected.token_ids, expected.logprobs)
        assert (delta.finish_reason, delta.error) == (expected.finish_reason, "")
    assert second.state.stats().total_generation_tokens == 0
    second.assert_nothing_is_left()


def test_only_requests_without_a_running_sequence_end_if_asked_so() -> None:
    driver = EngineDriver(make_options(60, max_seqs_per_forward=4))
    requests = [make_request(number, 5, 3, 20, ignore_eos=True) for number in range(4)]
    driver.step(requests)  # 4 of 12 sequences run
    while driver.state.totals.generation_tokens < 10:
        driver.step(num_results=1)
    running = {sequence.request.request_id for sequence in driver.running()}
    assert len(running) == 2
    stop(driver, requests, only_waiting=True)
    assert {delta.request_id for delta in driver.deltas} == {request.request_id for request in requests} - running
    assert {delta.finish_reason for delta in driver.deltas} == {"abort"}
    driver.run_until_idle()
    assert len(driver.deltas) == 12
    driver.assert_nothing_is_left()
