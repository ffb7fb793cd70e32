"""Pauses, new weights and cleared caches; test_engine runs all of them at random."""

import dataclasses
import random

import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.fake_grammars import BY_GRAMMAR, fake_vocabulary
from tests.manager.helpers.requests import Shape, make_request, make_requests, streamed
from tests.manager.helpers.simulation import join, simulate
from tokasaurus.messages.commands import (
    AbortRequests,
    ClearCache,
    CommandDone,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from tokasaurus.messages.generation import GenerateRequest

OPTIONS = make_options(60, max_tokens_per_forward=32, max_seqs_per_forward=8)


def update(command_id: int, version: str, clears_cache: bool = True, directory: str = "good") -> UpdateWeights:
    return UpdateWeights(command_id, directory, version, is_partial=False, clears_cache=clears_cache)


def run_until_done(driver: EngineDriver, *command_ids: int) -> None:
    for _ in range(200):
        if [done.command_id for done in driver.done[-len(command_ids) :]] == [*command_ids]:
            return
        driver.step(num_results=1)
    raise AssertionError(f"commands were not done: {driver.done}")


def run_until_tokens(driver: EngineDriver, num_tokens: int) -> None:
    while driver.state.totals.generation_tokens < num_tokens:
        driver.step(num_results=1)


def test_a_pause_waits_for_the_steps_in_flight_and_nothing_runs_until_resume() -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([make_request(number, max_new_tokens=30, ignore_eos=True) for number in range(3)])
    run_until_tokens(driver, 20)
    assert driver.queue
    driver.step([Pause(1, aborts=False)])
    assert not driver.done
    run_until_done(driver, 1)
    driver.step([make_request(7)])
    for _ in range(5):
        driver.step()
    stats = driver.state.stats()
    assert (stats.num_running, stats.num_waiting, len(driver.queue)) == (0, 4, 0)
    assert stats.total_preemptions == 0, "no blocks were short"
    driver.step([Resume(2)])
    driver.run_until_idle()
    assert {delta.request_id for delta in driver.deltas} == {"r0", "r1", "r2", "r7"}
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_abort_returns_the_tokens_so_far_of_all_that_run_and_wait(is_streamed: bool) -> None:
    requests = [make_request(number, 5, 3, 40, (), True, True) for number in range(4)]
    requests = [streamed(request) if is_streamed else request for request in requests]
    driver = EngineDriver(OPTIONS)  # 8 of 12 sequences run
    driver.step(requests)
    run_until_tokens(driver, 50)
    driver.step([Pause(1, aborts=True)])
    run_until_done(driver, 1)
    ends = {(delta.request_id, delta.sequence_index): delta for delta in driver.deltas if delta.finish_reason}
    assert len(ends) == 12
    assert {delta.finish_reason for delta in ends.values()} == {"abort"}
    num_tokens = 0
    for request in requests:
        for index in range(3):
            key = request.request_id, index
            own = [delta for delta in driver.deltas if (delta.request_id, delta.sequence_index) == key]
            token_ids = [token_id for delta in own for token_id in delta.token_ids]
            logprobs = [value for delta in own for value in delta.logprobs or ()]
            all_ids, all_logprobs, _ = simulate(request, index)
            assert token_ids == all_ids[: len(token_ids)]
            assert logprobs == pytest.approx(all_logprobs[: len(token_ids)])
            num_tokens += len(token_ids)
    assert num_tokens == driver.state.totals.generation_tokens >= 50
    driver.step([Resume(2)])
    driver.assert_nothing_is_left()


def test_an_aborted_request_for_prompt_logprobs_that_are_not_known_is_an_error() -> None:
    driver = EngineDriver(OPTIONS)
    request = dataclasses.replace(make_request(0), want_prompt_logprobs=True)
    driver.step([Pause(1, aborts=False), request, Pause(2, aborts=True)])
    run_until_done(driver, 1, 2)
    (delta,) = driver.deltas
    assert delta.error_code == "aborted"


def test_a_sequence_that_crosses_updates_says_which_tokens_are_of_which_weights() -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([make_request(0, max_new_tokens=30, ignore_eos=True)])
    lengths = []
    for number in range(3):  # no step between the second and the third
        if number < 2:
            run_until_tokens(driver, 5 + 6 * number)
        driver.step([Pause(3 * number, aborts=False), update(3 * number + 1, f"v{number}")])
        run_until_done(driver, 3 * number, 3 * number + 1)
        lengths.append(driver.state.totals.generation_tokens)
        if number == 0:
            driver.step([Resume(3 * number + 2)])
    driver.step([make_request(1, max_new_tokens=4, ignore_eos=True), Resume(20)])
    driver.run_until_idle()
    versions = {delta.request_id: delta.weight_versions for delta in driver.deltas}
    assert versions["r0"] == ((0, "0"), (lengths[0], "v0"), (lengths[2], "v2"))
    assert versions["r1"] == ((0, "v2"),)


@pytest.mark.parametrize("clears_cache", [True, False])
def test_new_weights_forget_cached_prompts_unless_they_are_told_not_to(clears_cache: bool) -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([make_request(0, 13)])
    driver.run_until_idle()
    driver.step([Pause(1, aborts=False), update(2, "v", clears_cache), Resume(3)])
    run_until_done(driver, 1, 2, 3)
    driver.step([make_request(0, 13)])
    driver.run_until_idle()
    assert driver.deltas[-1].num_cached_tokens == (0 if clears_cache else 12)


def test_refused_weights_change_nothing() -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([update(1, "v"), Pause(2, aborts=False), update(3, "v", directory="bad"), Resume(4), make_request(0)])
    run_until_done(driver, 1, 2, 3, 4)
    assert driver.done == [
        CommandDone(1, "the engine is not paused"),
        CommandDone(2),
        CommandDone(3, "no such directory"),
        CommandDone(4),
    ]
    driver.run_until_idle()
    assert driver.deltas[-1].weight_versions == ((0, "0"),)


def test_a_cache_is_not_cleared_while_sequences_run() -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([make_request(0, max_new_tokens=30, ignore_eos=True)])
    run_until_tokens(driver, 5)
    driver.step([ClearCache(1)])
    assert driver.done == [CommandDone(1, "sequences are running")]
    driver.run_until_idle()
    driver.step([ClearCache(2)])
    assert driver.done[-1] == CommandDone(2)
    assert driver.state.blocks.tree.num_blocks == 0


def test_a_sleeping_engine_forgets_its_cache_and_goes_on_only_after_waking() -> None:
    driver = EngineDriver(OPTIONS)
    driver.step([make_request(0, 13, max_new_tokens=20, ignore_eos=True)])
    run_until_tokens(driver, 5)
    driver.step([Sleep(1, with_weights=False), Pause(2, aborts=False), Sleep(3, with_weights=True)])
    run_until_done(driver, 1, 2, 3)
    assert driver.done[0] == CommandDone(1, "the engine is not paused")
    assert driver.state.blocks.tree.num_blocks == 0
    driver.step([Resume(4), update(5, "v"), Wake(6), Resume(7)])
    run_until_done(driver, 4, 5, 6, 7)
    assert [done.error for done in driver.done[-4:]] == ["the engine sleeps", "the engine sleeps", "", ""]
    driver.run_until_idle()
    (delta,) = driver.deltas
    assert delta.token_ids == simulate(make_request(0, 13, max_new_tokens=20, ignore_eos=True), 0)[0]


SHAPES = [Shape(0, 20, 2, 2, 12), Shape(1, 9, 0, 1, 30, ("a",)), Shape(-1, 40, 3, 3, 9, (), True, True, prompt_top=0)]


@pytest.mark.parametrize("seed", range(12))
def test_requests_that_are_aborted_at_any_time_return_the_tokens_so_far_and_others_go_on(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [dataclasses.replace(rng.choice(SHAPES), grammar=rng.choice(["", *BY_GRAMMAR])) for _ in range(16)]
    requests = make_requests(shapes, OPTIONS.limits)
    requests = [streamed(request) if rng.random() < 0.5 else request for request in requests]
    driver = EngineDriver(make_options(40, max_seqs_per_forward=6), rng=rng, vocabulary=fake_vocabulary())
    aborted = {request.request_id for request in requests if rng.random() < 0.6}
    left, to_abort, num_commands = list(requests), sorted(aborted), 0
    while left or to_abort or driver.queue or driver.state.queues.num_waiting or any(driver.jobs):
        messages: list[GenerateRequest | AbortRequests] = []
        if left and rng.random() < 0.5:
            messages.append(left.pop(0))
        sent = {request.request_id for request in requests if request not in left}
        if (ready := [one for one in to_abort if one in sent]) and rng.random() < 0.2:
            ids = tuple(rng.sample(ready, min(2, len(ready))))
            to_abort = [one for one in to_abort if one not in ids]
            messages.append(AbortRequests(num_commands, (*ids, "unknown")))
            num_commands += 1
        driver.step(messages, rng.randint(0, 2))
    assert [done.command_id for done in driver.done] == [*range(num_commands)]
    assert not any(done.error for done in driver.done)
    ends = {(delta.request_id, delta.sequence_index): delta for delta in join(driver.deltas)}
    assert len(ends) == sum(request.num_sequences for request in requests)
    num_cut = 0
    for request in requests:
        for index in range(request.num_sequences):
            delta = ends[request.request_id, index]
            if delta.error:
                assert delta.error_code == "aborted"
                assert request.want_prompt_logprobs
                continue
            token_ids, logprobs, reason = simulate(request, index)
            if delta.finish_reason == "abort":
                assert request.request_id in aborted
                num_cut += 1
                token_ids = token_ids[: len(delta.token_ids)]
            else:
                assert delta.finish_reason == reason
            assert delta.token_ids == token_ids
            assert delta.logprobs == (logprobs[: len(token_ids)] if request.want_logprobs else None)
    assert num_cut > 3
    driver.assert_nothing_is_left()
