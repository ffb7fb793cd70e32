"""Tests in which order a running engine admits the requests of several clients."""

from dataclasses import replace

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import simulate
from tokasaurus.manager.state.fair_queue import QUANTUM
from tokasaurus.messages.generation import CancelRequest

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
    admitted_before = driver.state.num_admissions
    deltas = driver.step([one], 1)
    while not any(delta.request_id == "r2" for delta in deltas):
        deltas = driver.step([], 1)
    # the rest of one turn, and the sequences admitted while the one token was computed
    assert driver.state.num_admissions - admitted_before <= QUANTUM + 1 + 4 * NUM_SLOTS
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
