"""When results may lie in the channel, so that one round of the manager applies several."""

import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.grammar_requests import ANYTHING, grammar_request
from tests.manager.helpers.grammar_requests import make_driver as make_grammar_driver
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.engine import RESULTS_SECONDS, SECONDS_RESERVED
from tokasaurus.messages.generation import GenerateRequest

STEP_SECONDS = 0.01


def decoding_driver(step_seconds: float = STEP_SECONDS, num_results: int = 1, **changed: object) -> EngineDriver:
    """One sequence decodes, and `num_results` of its results have been applied."""
    driver = EngineDriver(make_options(80, **changed), (step_seconds,))
    driver.assume_step_seconds(step_seconds)
    driver.step([request()])
    for _ in range(num_results):
        driver.step([], 1)
        driver.assume_step_seconds(step_seconds)
        driver.step()  # the queue is as full as that allows
    return driver


def request(number: int = 0, max_new_tokens: int = 100) -> GenerateRequest:
    return make_request(number, 5, 1, max_new_tokens, ignore_eos=True)


def test_they_wait_while_the_worker_has_work() -> None:
    driver = decoding_driver()
    seconds = driver.engine.seconds_results_may_wait()
    assert 0 < seconds <= RESULTS_SECONDS
    assert seconds <= driver.engine.seconds_left() - SECONDS_RESERVED + 0.001  # the clock goes on between the two calls


@pytest.mark.parametrize("step_seconds", [0.0001, 0.001, 0.004])
def test_they_do_not_wait_if_steps_take_little_time(step_seconds: float) -> None:
    assert decoding_driver(step_seconds).engine.seconds_results_may_wait() == 0


def test_a_first_token_is_awaited() -> None:
    driver = decoding_driver(num_results=0)
    assert any(step.begins for step in driver.state.steps_in_flight)
    assert driver.engine.seconds_results_may_wait() == 0


def test_the_last_token_is_awaited() -> None:
    driver = EngineDriver(make_options(80), (STEP_SECONDS,))
    driver.step([request(max_new_tokens=6)])
    driver.step([], 1)
    driver.assume_step_seconds(STEP_SECONDS)
    driver.step()
    waits = []
    while driver.queue:
        waits.append((len(driver.queue), driver.engine.seconds_results_may_wait()))
        driver.step([], 1)
        driver.assume_step_seconds(STEP_SECONDS)
    sent_all = [wait for num_queued, wait in waits if num_queued < max(num for num, _ in waits)]
    assert sent_all
    assert not any(sent_all)


def test_waiting_requests_await_the_end_of_others() -> None:
    driver = decoding_driver(max_seqs_per_forward=1)
    assert driver.engine.seconds_results_may_wait() > 0
    driver.step([request(1)])
    assert driver.state.queues.num_waiting == 1
    assert driver.engine.seconds_results_may_wait() == 0


def test_grammars_await_each_token() -> None:
    driver = make_grammar_driver()
    driver.step([grammar_request(0, ANYTHING)])
    for _ in range(6):
        driver.step([], 1)
    assert driver.state.slots.num_with_masks == 1
    driver.assume_step_seconds(1.0)
    assert driver.engine.seconds_results_may_wait() == 0


def test_commands_await_the_steps_before_them() -> None:
    driver = decoding_driver()
    driver.state.commands.append(object())  # type: ignore[arg-type]  # any
    assert driver.engine.seconds_results_may_wait() == 0
