"""Tests in which order a running engine admits the requests of several clients."""

import time
from dataclasses import replace

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import simulate
from tokasaurus.manager.engine.admission import MAX_ADMITTED
from tokasaurus.manager.engine.requests import MAX_RELEASED
from tokasaurus.manager.state.sequence_queues import QUANTUM
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.messages.status import EngineLimits

NUM_SLOTS = 4


def make_driver() -> EngineDriver:
    return EngineDriver(make_options(num_blocks=40, max_seqs_per_forward=NUM_SLOTS))


def test_one_token_request_passes_thousands_of_another_clients_samples() -> None:
    driver = make_driver()
    many = replace(make_request(1, num_sequences=6000, max_new_tokens=4, ignore_eos=True), client="a")
    one = replace(make_request(2, max_new_tokens=1, ignore_eos=True), client="b")
    driver.step([many])
    for _ in range(20):
        driver.step([], 1)
    admitted_before = driver.state.slots.num_admissions
    deltas = driver.step([one], 1)
    while not any(delta.request_id == "r2" for delta in deltas):
        deltas = driver.step([], 1)
    # the rest of one turn, and the sequences admitted while the one token was computed
    assert driver.state.slots.num_admissions - admitted_before <= QUANTUM + 1 + 4 * NUM_SLOTS
    assert driver.state.queues.num_waiting > 5800
    (delta,) = (delta for delta in deltas if delta.request_id == "r2")
    assert delta.token_ids == simulate(one, 0)[0]
    driver.step([CancelRequest("r1")])
    driver.run_until_idle()
    driver.assert_nothing_is_left()


def test_requests_finish_by_priority_and_background_requests_last() -> None:
    """With a single slot, requests of one client finish in the order of admission."""
    driver = EngineDriver(make_options(num_blocks=40, max_seqs_per_forward=1))
    priorities = [0, 5, -3, 0, -3]
    requests = [
        replace(make_request(number, max_new_tokens=3), client="a", priority=priority)
        for number, priority in enumerate(priorities)
    ]
    background = replace(make_request(9, max_new_tokens=3), client="b", priority=-100, is_background=True)
    driver.step([background, *requests])
    driver.run_until_idle()
    assert [delta.request_id for delta in driver.deltas] == ["r2", "r4", "r0", "r3", "r1", "r9"]
    driver.assert_nothing_is_left()


def largest_steps(num_samples: int) -> tuple[int, float, float]:
    """Fill an engine of 512 slots with one request, then cancel it.

    Returns the most sequences admitted in a step, and the CPU milliseconds of the slowest step before the cancellation
    and of the slowest step from then on.
    """
    limits = EngineLimits(40_000, 16, 1024)
    driver = EngineDriver(make_options(limits=limits, max_seqs_per_forward=512, max_tokens_per_forward=4096))
    state = driver.state
    request = make_request(1, num_sequences=num_samples, max_new_tokens=200, ignore_eos=True)
    max_admitted, seconds = 0, []
    step = driver.engine.step

    def timed_step(*args) -> None:
        nonlocal max_admitted
        num_before, start_s = state.slots.num_admissions, time.thread_time()
        step(*args)
        seconds.append(time.thread_time() - start_s)
        max_admitted = max(max_admitted, state.slots.num_admissions - num_before)

    driver.engine.step = timed_step
    driver.step([request])
    while state.slots.num_running < min(num_samples, 512):
        driver.step([], 1)
    slowest_s = max(seconds)
    seconds.clear()
    num_before, num_cancelled_steps = state.slots.num_running, 0
    driver.step([CancelRequest("r1")])
    while state.slots.num_running:
        driver.step([], 1)
        num_cancelled_steps += 1
        assert state.slots.num_running == max(0, num_before - (num_cancelled_steps + 1) * MAX_RELEASED)
    cancel_s = max(seconds)
    driver.run_until_idle()
    assert not driver.deltas
    driver.assert_nothing_is_left()
    return max_admitted, slowest_s * 1e3, cancel_s * 1e3


def test_a_request_with_65536_samples_is_admitted_in_short_steps() -> None:
    """Three tries, since a busy machine may stretch a step, which takes 2 to 5 ms. A step that created all samples
    would take a third of a second. That none fills the batch, or ends all of it, the counts say."""
    tries = [largest_steps(65_536) for _ in range(3)]
    assert {max_admitted for max_admitted, _, _ in tries} == {MAX_ADMITTED}
    assert min(slowest_ms for _, slowest_ms, _ in tries) < 60
    assert min(cancel_ms for _, _, cancel_ms in tries) < 60
