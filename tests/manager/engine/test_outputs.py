"""Tests how results are applied: which texts are decoded, which tokens count, and when deltas are sent."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request, make_requests, sequence_keys, streamed
from tests.manager.helpers.simulation import assert_equals_simulation, decode_text, join, simulate
from tests.manager.helpers.strategies import STOP_TOKENS, random_shape
from tokasaurus.manager.engine import outputs
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.engine.outputs import MAX_RELEASED, apply_output
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.text.stop_strings import StopTokens

"""Streams get a delta in every step."""


def run_counting_texts(stop_strings: tuple[str, ...], mode: str, stop_tokens: StopTokens | None) -> int:
    """Number of texts decoded for one sequence of 60 tokens that contains none of `stop_strings`."""
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode_text(list(token_ids))

    request = make_request(4, 5, 1, 60, stop_strings, ignore_eos=True)
    driver = EngineDriver(make_options(decode_text=decode, deferred_tasks=mode, stop_tokens=stop_tokens), (0.01,))
    driver.step([request])
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, [request])
    assert [delta.finish_reason for delta in driver.deltas] == ["length"]
    return len(decoded)


def test_text_is_decoded_only_after_tokens_that_may_end_a_stop_string():
    stop_strings = ("gggg",)
    may_end = [
        token_id for token_id in simulate(make_request(4, 5, 1, 60, (), True), 0)[0] if token_id in (4, 5, 6, 11)
    ]
    assert 10 < len(may_end) < 50
    assert run_counting_texts(stop_strings, "always", None) == 60
    assert run_counting_texts(stop_strings, "always", STOP_TOKENS) <= len(may_end) + 1
    assert run_counting_texts(stop_strings, "deferred", None) <= 60 / 8 + 2


@pytest.mark.parametrize("mode", ["always", "deferred"])
def test_tokens_sampled_after_a_stop_string_or_a_cancel_are_not_counted(mode):
    """Steps are sent ahead, so the worker samples more tokens than are kept."""
    requests = [make_request(n, 5, 2, 60, ("ab", "c"), want_logprobs=True) for n in range(4)]
    cancelled = make_request(9, 5, 1, 60, ignore_eos=True)
    driver = EngineDriver(
        make_options(200, max_seqs_per_forward=9, deferred_tasks=mode, stop_tokens=STOP_TOKENS), (0.01,)
    )
    driver.step([*requests, cancelled])
    for _ in range(5):
        driver.step([], 1)
    (sequence,) = driver.state.unfinished["r9"].sequences
    num_before = len(sampled_tokens(driver.state, sequence))
    driver.step([CancelRequest("r9")])
    driver.run_until_idle()
    driver.step()
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 8
    num_kept = sum(len(delta.token_ids) for delta in driver.deltas)
    assert sum(driver.worker.num_sampled.values()) > num_kept + num_before > num_kept
    assert driver.state.stats().total_generation_tokens == num_kept + num_before


def test_recompiles_and_graph_misses_are_summed_over_all_steps():
    driver = EngineDriver()
    driver.step([make_request(1)])
    for step, num_recompiles in zip(list(driver.state.steps_in_flight), (2, 1), strict=True):
        tokens = np.ones(len(step.sampled), np.int32)
        missed = ForwardOutput(step.step_id, tokens, None, 0.01, num_recompiles, missed_graphs=True)
        apply_output(driver.state, missed)
    assert driver.state.stats().total_recompiles == 3
    assert driver.state.stats().total_graph_misses == 2


def test_the_device_is_idle_only_while_sequences_are_left():
    driver = EngineDriver()
    idle_s = []

    def answer(seconds, *messages):
        """One result, before whose step the device was idle for so long."""
        result = driver.worker.forward(driver.queue.popleft(), 0.01)
        driver.engine.step(messages, [dataclasses.replace(result, idle_seconds=seconds)])
        idle_s.append(driver.state.stats().total_device_idle_seconds)

    driver.step([make_request(1, 5, 1, 20, ignore_eos=True)])
    answer(100.0)
    answer(0.25)
    answer(0.5)
    assert idle_s == [0, 0.25, 0.75], "no step came before the first"
    driver.step([CancelRequest("r1")])
    while driver.queue:
        answer(0.0)
    driver.step()
    assert driver.state.slots.num_running == 0
    driver.step([make_request(2, 5, 1, 20, ignore_eos=True)])
    answer(100.0)
    answer(0.25)
    assert idle_s[-2:] == [0.75, 1.0], "nothing was left to compute before the second request"


@pytest.mark.parametrize(("step_id", "num_tokens"), [(1, 1), (0, 2)])
def test_a_result_with_the_wrong_step_id_or_row_count_fails_an_assertion(step_id, num_tokens):
    driver = EngineDriver()
    driver.step([make_request(1)])
    with pytest.raises(AssertionError):
        apply_output(driver.state, ForwardOutput(step_id, np.zeros(num_tokens, np.int32), None, 0.01))


SHAPES = random_shape(
    stop_strings=st.sampled_from([(), (), ("ab",), ("é", "gf"), ("abcdabcd",)]),
    ignore_eos=st.booleans(),
    want_logprobs=st.booleans(),
)


@examples(60)
@given(
    st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["always", "deferred"]),
    st.integers(0, 1000),
)
def test_joined_deltas_equal_the_whole_sequence_despite_deferred_tasks_and_preemption(shapes, mode, seed):
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
    assert driver.state.slots.num_streamed == 0


def test_streams_resume_after_preemption_where_they_stopped(monkeypatch):
    monkeypatch.setattr(outputs, "STREAM_SECONDS", 0.0)
    driver = EngineDriver(make_options(12, deferred_tasks="always"), forecast=EndsNext())
    requests = [streamed(make_request(n, 5, 2, 30, ("zz",) * (n % 2), True, n % 3 == 0)) for n in range(4)]
    driver.run(requests)
    assert driver.state.stats().total_preemptions > 4
    assert len(driver.deltas) > 4 * 2 * 15, "most deltas have one token"
    assert_equals_simulation(join(driver.deltas), requests)


@pytest.mark.parametrize("stop_strings", [(), ("never",)])
def test_each_token_is_streamed_in_the_step_in_which_its_result_arrives(stop_strings, monkeypatch):
    monkeypatch.setattr(outputs, "STREAM_SECONDS", 0.0)
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


def test_tokens_that_may_follow_a_stop_string_are_not_streamed():
    """The stop string search is deferred, so tokens are known before it is known whether they are kept."""
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


def test_a_cancelled_stream_sends_no_more_deltas():
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


NUM_COMMON_ENDS = 3 * MAX_RELEASED


def driver_of_common_end() -> tuple[EngineDriver, GenerateRequest]:
    """An engine whose sequences, the samples of a request, have all ended in the same step. They had all waited for
    their prompt, whose prefill takes more steps than their admission. The first have left."""
    limits = EngineLimits(5000, 4, 8000)
    options = make_options(
        limits=limits,
        max_seqs_per_forward=NUM_COMMON_ENDS,
        max_tokens_per_forward=NUM_COMMON_ENDS,
        deferred_tasks="always",  # otherwise a busy machine may admit them later
    )
    driver = EngineDriver(options, (0.002,))
    request = make_request(0, 16 * NUM_COMMON_ENDS + 1, NUM_COMMON_ENDS, 2, ignore_eos=True)
    driver.step([request])
    while not driver.state.ending:
        driver.step([], 1)
    assert driver.state.slots.num_releases == len(driver.deltas) == MAX_RELEASED
    assert len(driver.state.ending) == NUM_COMMON_ENDS - MAX_RELEASED
    return driver, request


def test_hundreds_of_sequences_that_end_at_once_leave_in_short_turns():
    driver, request = driver_of_common_end()
    state = driver.state
    while state.ending:
        num_before = state.slots.num_releases
        driver.step([], 1)
        assert 0 < state.slots.num_releases - num_before <= MAX_RELEASED + int(2 * state.admission.usual_releases)
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, [request])
    driver.assert_nothing_is_left()


def test_sequences_cancelled_while_they_wait_for_their_end_leave_once():
    driver, request = driver_of_common_end()
    num_to_leave = [len(driver.state.ending)]
    driver.step([CancelRequest(request.request_id)], 1)
    while driver.queue or driver.state.ending or driver.state.cancelled:
        num_to_leave.append(driver.state.slots.num_running)
        driver.step([], 1)
    assert num_to_leave[:3] == [2 * MAX_RELEASED, MAX_RELEASED, 0]
    assert len(driver.deltas) == MAX_RELEASED
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("num_ahead", [1, 2, 8])
def test_a_few_ends_per_turn_change_no_result_and_preempt_nothing(num_ahead, monkeypatch):
    """Sequences that keep their blocks while they wait for their end give way before any other is preempted."""
    monkeypatch.setattr(outputs, "MAX_RELEASED", 1)
    requests = [make_request(number, 5, 6, 6 + 8 * (number % 2), ignore_eos=True) for number in range(30)]
    options = make_options(36, max_seqs_per_forward=30, max_tokens_per_forward=64, scheduling_steps_ahead=num_ahead)
    driver = EngineDriver(options, (0.001,), rng=random.Random(num_ahead))
    driver.run(requests)
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, requests)
    assert driver.state.totals.preemptions == 0
    driver.assert_nothing_is_left()
