"""Tokens of streams leave as they come; joined, they are those of a sequence that is not streamed."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.engine_driver import (
    Bench,
    EndsNext,
    Shape,
    assert_equals_simulation,
    make_options,
    make_requests,
    sequence_keys,
)
from tests.manager.helpers.fake_worker import VOCAB_SIZE, decode_text, make_request, simulate
from tokasaurus.messages.generation import CancelRequest, GenerateRequest, SequenceDelta
from tokasaurus.text.stop_strings import StopTokens

STOP_TOKENS = StopTokens([decode_text([token_id]) for token_id in range(VOCAB_SIZE)])

SHAPES = st.builds(
    Shape,
    prefix=st.integers(0, 2),
    num_shared=st.integers(0, 12),
    num_fresh=st.integers(1, 8),
    num_sequences=st.integers(1, 3),
    max_new_tokens=st.integers(1, 24),
    stop_strings=st.sampled_from([(), (), ("ab",), ("é", "gf"), ("abcdabcd",)]),
    ignore_eos=st.booleans(),
    want_logprobs=st.booleans(),
)


def streamed(request: GenerateRequest) -> GenerateRequest:
    return dataclasses.replace(request, is_streamed=True)


def join(deltas: Iterable[SequenceDelta]) -> list[SequenceDelta]:
    """One delta per sequence, as if none had been streamed. Nothing may follow a last delta."""
    joined: dict[tuple[str, int], SequenceDelta] = {}
    for delta in deltas:
        before = joined.get((delta.request_id, delta.sequence_index))
        if before is not None:
            assert before.finish_reason is None, "a delta after the last"
            logprobs = None if delta.logprobs is None else [*(before.logprobs or []), *delta.logprobs]
            assert delta.prompt_logprobs is None, "not on the first delta"
            delta = dataclasses.replace(
                delta,
                token_ids=before.token_ids + delta.token_ids,
                logprobs=logprobs,
                prompt_logprobs=before.prompt_logprobs,
            )
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        joined[delta.request_id, delta.sequence_index] = delta
    return list(joined.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["always", "deferred"]),
    st.integers(0, 1000),
)
def test_joined_deltas_are_the_whole_sequence_whatever_is_put_off_or_put_back(shapes, mode, seed):
    options = make_options(20, deferred_tasks=mode, stop_tokens=STOP_TOKENS if seed % 2 else None)
    requests = make_requests([shape for shape, _ in shapes], options.limits)
    requests = [
        streamed(request) if is_streamed else request
        for request, (_, is_streamed) in zip(requests, shapes, strict=True)
    ]
    bench = Bench(options, forecast=EndsNext())
    bench.rng.seed(seed)
    bench.run(requests)
    joined = join(bench.deltas)
    assert_equals_simulation(joined, requests)
    assert len(joined) == len(sequence_keys(requests))
    whole = {request.request_id for request in requests if not request.is_streamed}
    for delta in bench.deltas:
        assert delta.finish_reason is not None or delta.request_id not in whole
    bench.assert_nothing_is_left()
    assert not bench.state.streaming


def test_sequences_that_are_put_back_amid_their_streams_go_on_where_they_were():
    bench = Bench(make_options(12, deferred_tasks="always"), forecast=EndsNext())
    requests = [streamed(make_request(n, 5, 2, 30, ("zz",) * (n % 2), True, n % 3 == 0)) for n in range(4)]
    bench.run(requests)
    assert bench.state.stats().total_preemptions > 4
    assert len(bench.deltas) > 4 * 2 * 15, "most tokens come one by one"
    assert_equals_simulation(join(bench.deltas), requests)


@pytest.mark.parametrize("stop_strings", [(), ("never",)])
def test_each_result_leaves_in_the_turn_in_which_it_comes(stop_strings):
    request = streamed(make_request(3, 5, 2, 20, stop_strings, ignore_eos=True, want_logprobs=True))
    bench = Bench(make_options(40, deferred_tasks="always", stop_tokens=STOP_TOKENS), (0.01,))
    bench.turn([request])
    expected = [simulate(request, index)[0] for index in range(2)]
    for position in range(20):
        deltas = {delta.sequence_index: delta for delta in bench.turn([], 1)}
        assert {index: delta.token_ids for index, delta in deltas.items()} == {
            index: [expected[index][position]] for index in range(2)
        }
        assert {delta.finish_reason for delta in deltas.values()} == {"length" if position == 19 else None}
    assert not bench.queue


def test_nothing_leaves_that_may_follow_a_stop_string():
    """Looking for stop strings is put off, so tokens are known before it is known that they count."""
    requests = [streamed(make_request(n, 5, 1, 60, ("ab", "c", "dd"), ignore_eos=True)) for n in range(8)]
    bench = Bench(
        make_options(200, max_seqs_per_forward=8, deferred_tasks="deferred", stop_tokens=STOP_TOKENS), (0.01,)
    )
    bench.turn(requests)
    sent: dict[str, list[int]] = defaultdict(list)
    while bench.queue:
        for delta in bench.turn([], 1):
            sent[delta.request_id] += delta.token_ids
        for request in requests:
            expected = simulate(request, 0)[0]
            assert sent[request.request_id] == expected[: len(sent[request.request_id])]
    assert_equals_simulation(join(bench.deltas), requests)


def test_a_stream_that_is_cancelled_sends_no_more():
    requests = [streamed(make_request(n, 5, 1, 60, ignore_eos=True)) for n in range(2)]
    bench = Bench(make_options(200, deferred_tasks="always"), (0.01,))
    bench.turn(requests)
    for _ in range(5):
        bench.turn([], 1)
    assert {delta.request_id for delta in bench.deltas} == {"r0", "r1"}
    bench.turn([CancelRequest("r1")])
    bench.deltas.clear()
    bench.run_until_idle()
    assert {delta.request_id for delta in bench.deltas} == {"r0"}
    bench.assert_nothing_is_left()
