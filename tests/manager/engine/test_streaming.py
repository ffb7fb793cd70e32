"""Tokens of streams leave as they come; joined, they are those of a sequence that is not streamed."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request, make_requests, sequence_keys, streamed
from tests.manager.helpers.simulation import assert_equals_simulation, join, simulate
from tests.manager.helpers.strategies import STOP_TOKENS, random_shape
from tokasaurus.messages.generation import CancelRequest

SHAPES = random_shape(
    stop_strings=st.sampled_from([(), (), ("ab",), ("é", "gf"), ("abcdabcd",)]),
    ignore_eos=st.booleans(),
    want_logprobs=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["always", "deferred"]),
    st.integers(0, 1000),
)
def test_joined_deltas_are_the_whole_sequence_despite_deferred_tasks_and_preemption(shapes, mode, seed):
    options = make_options(20, deferred_tasks=mode, stop_tokens=STOP_TOKENS if seed % 2 else None)
    requests = make_requests([shape for shape, _ in shapes], options.limits)
    requests = [
        streamed(request) if is_streamed else request
        for request, (_, is_streamed) in zip(requests, shapes, strict=True)
    ]
    driver = EngineDriver(options, forecast=EndsNext())
    driver.rng.seed(seed)
    driver.run(requests)
    joined = join(driver.deltas)
    assert_equals_simulation(joined, requests)
    assert len(joined) == len(sequence_keys(requests))
    whole = {request.request_id for request in requests if not request.is_streamed}
    for delta in driver.deltas:
        assert delta.finish_reason is not None or delta.request_id not in whole
    driver.assert_nothing_is_left()
    assert not driver.state.streaming


def test_streams_continue_after_preemption_where_they_were():
    driver = EngineDriver(make_options(12, deferred_tasks="always"), forecast=EndsNext())
    requests = [streamed(make_request(n, 5, 2, 30, ("zz",) * (n % 2), True, n % 3 == 0)) for n in range(4)]
    driver.run(requests)
    assert driver.state.stats().total_preemptions > 4
    assert len(driver.deltas) > 4 * 2 * 15, "most tokens come one by one"
    assert_equals_simulation(join(driver.deltas), requests)


@pytest.mark.parametrize("stop_strings", [(), ("never",)])
def test_each_result_is_sent_in_the_step_in_which_it_comes(stop_strings):
    request = streamed(make_request(3, 5, 2, 20, stop_strings, ignore_eos=True, want_logprobs=True))
    driver = EngineDriver(make_options(40, deferred_tasks="always", stop_tokens=STOP_TOKENS), (0.01,))
    driver.step([request])
    expected = [simulate(request, index)[0] for index in range(2)]
    for position in range(20):
        deltas = {delta.sequence_index: delta for delta in driver.step([], 1)}
        assert {index: delta.token_ids for index, delta in deltas.items()} == {
            index: [expected[index][position]] for index in range(2)
        }
        assert {delta.finish_reason for delta in deltas.values()} == {"length" if position == 19 else None}
    assert not driver.queue


def test_no_token_is_sent_that_may_follow_a_stop_string():
    """The search for stop strings is deferred, so tokens are known before it is known that they count."""
    requests = [streamed(make_request(n, 5, 1, 60, ("ab", "c", "dd"), ignore_eos=True)) for n in range(8)]
    driver = EngineDriver(
        make_options(200, max_seqs_per_forward=8, deferred_tasks="deferred", stop_tokens=STOP_TOKENS), (0.01,)
    )
    driver.step(requests)
    sent: dict[str, list[int]] = defaultdict(list)
    while driver.queue:
        for delta in driver.step([], 1):
            sent[delta.request_id] += delta.token_ids
        for request in requests:
            expected = simulate(request, 0)[0]
            assert sent[request.request_id] == expected[: len(sent[request.request_id])]
    assert_equals_simulation(join(driver.deltas), requests)


def test_a_stream_that_is_cancelled_sends_no_more():
    requests = [streamed(make_request(n, 5, 1, 60, ignore_eos=True)) for n in range(2)]
    driver = EngineDriver(make_options(200, deferred_tasks="always"), (0.01,))
    driver.step(requests)
    for _ in range(5):
        driver.step([], 1)
    assert {delta.request_id for delta in driver.deltas} == {"r0", "r1"}
    driver.step([CancelRequest("r1")])
    driver.deltas.clear()
    driver.run_until_idle()
    assert {delta.request_id for delta in driver.deltas} == {"r0"}
    driver.assert_nothing_is_left()
