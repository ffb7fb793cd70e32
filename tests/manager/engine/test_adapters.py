"""Requests with adapters: turns, versions, cancellations, commands; test_engine has them in its random runs."""

from dataclasses import replace

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import simulate
from tokasaurus.messages.commands import AbortRequests, LoadAdapter, Pause, Resume, UnloadAdapter
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.status import AdapterLoad

A, B, C = "aa", "bb", "cc"


def request(number: int, adapter: str, max_new_tokens: int = 6, num_sequences: int = 1) -> GenerateRequest:
    made = make_request(number, 9, num_sequences, max_new_tokens, ignore_eos=True)
    return replace(made, adapter=adapter, adapter_version=adapter and f"{adapter}@1")


def make_driver(max_loras: int = 1) -> EngineDriver:
    return EngineDriver(make_options(60, max_loras=max_loras, max_seqs_per_forward=8, max_tokens_per_forward=64))


def test_adapters_get_their_turns_in_the_order_of_their_first_waiting_request() -> None:
    driver = make_driver()
    order = [A, B, A, C, B, ""]
    driver.step([request(number, adapter) for number, adapter in enumerate(order)])
    assert {sequence.request.request_id for sequence in driver.running()} == {"r0", "r5"}
    stats = driver.state.stats()
    assert stats.num_waiting == 4
    assert {*stats.adapters} == {AdapterLoad(A, 1, 1), AdapterLoad(B, 0, 2), AdapterLoad(C, 0, 1)}
    driver.run_until_idle()
    ended = [delta.request_id for delta in driver.deltas]
    # r2 does not run with r0, though it has the same adapter: B would wait for as long as requests with A come
    assert ended.index("r1") < ended.index("r2") < ended.index("r3")
    assert ended.index("r4") < ended.index("r2")
    for delta in driver.deltas:
        number = int(delta.request_id[1:])
        assert delta.token_ids == simulate(request(number, order[number]), 0)[0]
        assert delta.weight_versions == ((0, f"{order[number]}@1" if order[number] else "0"),)
    driver.assert_nothing_is_left()


def test_equal_prompts_share_their_kv_under_one_adapter_only() -> None:
    """The fake worker refuses to read what was computed with another one."""
    driver = make_driver(max_loras=2)
    prompts = make_request(7, 16).prompt_ids

    def cached(number: int, adapter: str) -> int:
        driver.step([replace(request(number, adapter), prompt_ids=prompts)])
        driver.run_until_idle()
        return driver.deltas[-1].num_cached_tokens

    assert [cached(0, A), cached(1, B), cached(2, ""), cached(3, A), cached(4, C), cached(5, A)] == [0, 0, 0, 15, 0, 15]
    driver.assert_nothing_is_left()


def test_a_request_that_waits_for_its_adapter_can_be_cancelled_and_aborted() -> None:
    driver = make_driver()
    driver.step([request(0, A, 20), request(1, B, num_sequences=3), request(2, B, num_sequences=2), request(3, C)])
    driver.step([CancelRequest("r1")])
    driver.step([AbortRequests(1, ("r2",))])
    aborted = [delta for delta in driver.deltas if delta.request_id == "r2"]
    assert [(delta.finish_reason, delta.token_ids) for delta in aborted] == [("abort", [])] * 2
    driver.step([Pause(2, aborts=True)])
    while len(driver.done) < 2:
        driver.step(num_results=1)
    assert {delta.request_id for delta in driver.deltas if delta.finish_reason == "abort"} == {"r0", "r2", "r3"}
    driver.step([Resume(3), request(4, B)])
    driver.run_until_idle()
    assert driver.deltas[-1].token_ids == simulate(request(4, B), 0)[0]
    driver.assert_nothing_is_left()


def test_loading_and_unloading_need_no_pause_and_a_number_goes_back() -> None:
    driver = make_driver(max_loras=1)
    driver.step([LoadAdapter(1, A, "/a"), request(0, A, 12)])
    for _ in range(4):
        driver.step(num_results=1)
    assert driver.running()
    driver.step([LoadAdapter(2, B, "/b")])
    driver.run_until_idle()
    while len(driver.done) < 2:
        driver.step()
    assert [*driver.state.adapters.loaded] == [A, B]
    driver.step([UnloadAdapter(3, A)])
    while len(driver.done) < 3:
        driver.step()
    assert [*driver.state.adapters.loaded] == [B]
    driver.step([LoadAdapter(4, A, "/a")])
    while len(driver.done) < 4:
        driver.step()
    driver.step([request(1, A)])  # the worker is told its number again
    driver.run_until_idle()
    assert driver.deltas[-1].request_id == "r1"
    driver.assert_nothing_is_left()


def test_an_adapter_that_is_unloaded_before_any_step_is_not_placed() -> None:
    """The worker has forgotten it when the next step arrives."""
    driver = make_driver()
    driver.step([LoadAdapter(1, A, "/a")])
    while not driver.done:
        driver.step()
    driver.state.is_paused = True  # no step places it
    driver.step([request(0, A)])
    driver.step([CancelRequest("r0")])
    driver.state.is_paused = False
    driver.step([UnloadAdapter(2, A), request(1, "")])
    driver.run_until_idle()
    assert driver.worker.adapters == {0: ""}
    driver.assert_nothing_is_left()
