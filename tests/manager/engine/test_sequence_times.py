"""When a sequence was admitted, had its first token and ended, across preemption and streams."""

import time
from dataclasses import replace

import pytest

from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tokasaurus.messages.generation import SequenceDelta, SequenceTimes

Spans = dict[tuple[str, int], tuple[float, float]]
"""Between which two times something has happened, by request and sample."""


def run_and_watch(driver: EngineDriver) -> tuple[Spans, Spans, Spans]:
    """Runs until nothing is left -> when each sequence was first seen to run, to have a token, and to end.

    A sequence may run, and be preempted, within one step: then it waits, and has its times."""
    admitted: Spans = {}
    begun: Spans = {}
    ended: Spans = {}
    while driver.queue or driver.state.ending or driver.state.queues.num_waiting:
        before_s = time.monotonic()
        deltas = driver.step([], driver.rng.randint(0, 2))
        during = (before_s, time.monotonic())
        for sequence in driver.state.queues.first_waiting(100):
            key = (sequence.request.request_id, sequence.index)
            if sequence.admitted_s:
                admitted.setdefault(key, during)
            if sequence.first_token_s:
                begun.setdefault(key, during)
        for sequence in driver.running():
            key = (sequence.request.request_id, sequence.index)
            admitted.setdefault(key, during)
            slots = driver.state.slots
            if slots.num_known_tokens[sequence.slot] > len(sequence.request.prompt_ids):
                begun.setdefault(key, during)
        for delta in deltas:
            key = (delta.request_id, delta.sequence_index)
            if delta.token_ids:
                begun.setdefault(key, during)
            if delta.finish_reason is not None:
                ended[key] = during
    return admitted, begun, ended


@pytest.mark.parametrize("is_streamed", [False, True])
def test_times_are_those_of_the_first_admission_the_first_token_and_the_end(is_streamed: bool) -> None:
    driver = EngineDriver(make_options(16, max_seqs_per_forward=6), forecast=EndsNext())
    requests = [
        replace(make_request(number, 6, 3, max_new_tokens=12, ignore_eos=True), is_streamed=is_streamed)
        for number in range(4)
    ]
    before_s = time.monotonic()
    first_deltas = driver.step(requests)
    during = (before_s, time.monotonic())
    assert not first_deltas
    at_once = {(one.request.request_id, one.index): during for one in driver.running()}
    admitted, begun, ended = run_and_watch(driver)
    admitted |= at_once
    assert driver.state.totals.preemptions > 0
    times = {(delta.request_id, delta.sequence_index): delta.times for delta in driver.deltas if delta.times}
    assert len(times) == 12
    for key, found in times.items():
        for found_s, (earliest_s, latest_s) in (
            (found.admitted_s, admitted[key]),
            (found.first_token_s, begun[key]),
            (found.ended_s, ended[key]),
        ):
            assert earliest_s <= found_s <= latest_s
        assert found.num_tokens == 12


def last_times(deltas: list[SequenceDelta]) -> list[SequenceTimes | None]:
    return [delta.times for delta in deltas if delta.finish_reason is not None]


def test_only_last_deltas_have_times() -> None:
    driver = EngineDriver(make_options(40))
    driver.step([replace(make_request(0, 5, max_new_tokens=9, ignore_eos=True), is_streamed=True)])
    driver.run_until_idle()
    assert len(driver.deltas) > 1
    assert [delta.times is not None for delta in driver.deltas] == [False] * (len(driver.deltas) - 1) + [True]


def test_a_request_for_no_tokens_has_the_time_of_its_prompt() -> None:
    driver = EngineDriver(make_options(40))
    driver.step([replace(make_request(0, 5, max_new_tokens=0), want_prompt_logprobs=True)])
    driver.run_until_idle()
    (times,) = last_times(driver.deltas)
    assert times is not None
    assert 0 < times.admitted_s <= times.first_token_s <= times.ended_s
    assert times.num_tokens == 0


def test_evicted_blocks_are_those_that_leave_the_cache() -> None:
    driver = EngineDriver(make_options(20))
    num_cached = num_evicted = 0
    for number in range(8):
        driver.step([make_request(number, 16, max_new_tokens=4, ignore_eos=True)])
        driver.run_until_idle()
        stats = driver.state.stats()
        assert stats.num_kv_blocks_cached == driver.state.blocks.tree.num_blocks, "nothing runs"
        # 16 + 4 tokens, of which the last has no KV: four whole blocks of four
        assert stats.num_kv_blocks_cached - num_cached == 4 - (stats.total_kv_blocks_evicted - num_evicted)
        num_cached, num_evicted = stats.num_kv_blocks_cached, stats.total_kv_blocks_evicted
    assert num_evicted > 0
