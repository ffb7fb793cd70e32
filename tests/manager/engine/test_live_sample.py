"""Samples of a whole engine, against replays of its state, what happens later, and blocks counted one by one."""

import itertools
import time
from collections import Counter
from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest

from tests.helpers.examples import few
from tests.manager.helpers.block_accounting import block_table
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options, make_quick_driver
from tests.manager.helpers.kv_usage_replay import replay_usage
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tokasaurus.manager.engine.kv_forecast import running_progress
from tokasaurus.manager.engine.live_sample import MAX_WAIT_SECONDS, LiveSampler
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.commands import Pause, Resume
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.live import MAX_OLD_REQUESTS, LiveSample, LiveStage, TakeSample
from tokasaurus.messages.stages import StageBoard, StageTotals

STEPS_AHEAD = 4


def take(driver: EngineDriver, sampler: LiveSampler, begins: bool = False) -> LiveSample:
    driver.step([TakeSample(begins)])
    assert driver.state.asked_sample is not None
    return sampler.take(driver.state, driver.state.stats(), driver.engine.timers.totals)


def random_requests(rng: Random, count: int, options, first: int = 0) -> list[GenerateRequest]:
    """Whose sequences all end at max_new_tokens."""
    shapes = [
        Shape(
            prefix=rng.choice([0, 1]),
            num_shared=rng.randint(0, 24),
            num_fresh=rng.randint(0, 8),
            num_sequences=rng.randint(1, 4),
            max_new_tokens=rng.randint(1, 24),
        )
        for _ in range(first + count)
    ]
    return make_requests(shapes, options.limits)[first:]


def quick_driver(seed: int, num_blocks: int = 40, **changed) -> EngineDriver:
    options = make_options(num_blocks, 4, scheduling_steps_ahead=STEPS_AHEAD, max_seqs_per_forward=12, **changed)
    return make_quick_driver(options, seed)


@pytest.mark.parametrize("seed", range(12))
def test_the_forecast_equals_a_replay_step_by_step_and_what_really_happens(seed: int) -> None:
    driver, sampler = quick_driver(seed), LiveSampler()
    rng = Random(seed)
    requests = random_requests(rng, 10, driver.options)
    num_compared = 0
    while requests or driver.state.queues.num_waiting:
        driver.step([requests.pop(0) for _ in range(rng.randint(0, 2)) if requests], rng.randint(0, 2))
        if rng.random() < 0.3 and driver.state.slots.num_running:
            num_compared += compare_with_replay(driver, take(driver, sampler))
    # Nothing is admitted from here on. Each result arrives as late as it can: before the step that needs it.
    sample = take(driver, sampler)
    first_step, used = driver.state.next_step_id, {0: driver.state.blocks.num_used}
    is_exact = not any(sequence.phase is Phase.DRAINING for sequence in driver.running())
    while driver.queue:
        driver.step([], 1)
        used.setdefault(driver.state.next_step_id - first_step, driver.state.blocks.num_used)
    assert sample.forecast is not None
    num_compared += 1
    for step, blocks in zip(sample.forecast.steps, sample.forecast.blocks, strict=True):
        if step in used:
            assert used[step] == blocks if is_exact or step >= STEPS_AHEAD else used[step] <= blocks
    assert max(used.values()) <= sample.forecast.peak
    assert num_compared > 3


def compare_with_replay(driver: EngineDriver, sample: LiveSample) -> int:
    """Assert that the points lie on the curve of the replayed state, and that it is straight between them but for the
    steps in which sequences allocate blocks. Returns 1."""
    replayed, forecast = replay_usage(driver.state), sample.forecast
    assert forecast is not None
    assert forecast.step == driver.state.next_step_id
    assert (forecast.steps[0], forecast.blocks[-1]) == (0, 0)
    assert (
        forecast.limit
        == sample.stats.num_kv_blocks_total
        == sum((sample.blocks.own, sample.blocks.shared, sample.blocks.cached, sample.blocks.free))
    )
    usage = dict(enumerate(replayed))
    # It is not known in which step in flight a draining sequence ended: the forecast assumes the last one.
    is_exact = not any(sequence.phase is Phase.DRAINING for sequence in driver.running())
    for step, blocks in zip(forecast.steps, forecast.blocks, strict=True):
        expected = usage.get(step, 0)
        assert blocks == expected if is_exact or step >= STEPS_AHEAD else blocks >= expected
    points = list(zip(forecast.steps, forecast.blocks, strict=True))
    for (start, low), (end, high) in itertools.pairwise(points):
        for step in range(max(start, STEPS_AHEAD) + 1, end):
            assert low <= usage.get(step, 0) <= high
    assert forecast.peak >= max(replayed)
    assert not is_exact or forecast.peak == max(replayed)
    return 1


@pytest.mark.parametrize("seed", range(8))
def test_blocks_by_their_users_equal_a_count_block_by_block(seed: int) -> None:
    driver, sampler, rng = quick_driver(seed), LiveSampler(), Random(seed)
    requests, num_kinds = random_requests(rng, 12, driver.options), Counter[str]()
    while requests or driver.queue:
        driver.step([requests.pop(0) for _ in range(rng.randint(0, 2)) if requests], rng.randint(0, 2))
        use = take(driver, sampler).blocks
        users = Counter(block for sequence in driver.running() for block in block_table(driver.state, sequence))
        assert use.own == sum(count == 1 for count in users.values())
        assert use.shared == sum(count > 1 for count in users.values())
        assert use.free == driver.state.blocks.num_free
        assert use.own + use.shared + use.cached + use.free == driver.options.limits.num_kv_blocks
        num_kinds.update(name for name in ("own", "shared", "cached", "free") if getattr(use, name))
    assert all(num_kinds[name] > 3 for name in ("own", "shared", "cached", "free"))


@few(3, "seed", range(8))
def test_the_next_sequence_is_admitted_about_when_the_sample_says(seed: int) -> None:
    driver, sampler, rng = quick_driver(seed, 30, deferred_tasks="always"), LiveSampler(), Random(seed)
    requests = random_requests(rng, 30, driver.options)
    driver.step(requests)
    predicted: dict[tuple[str, int], list[tuple[int, int]]] = {}
    admitted: dict[tuple[str, int], int] = {}
    reasons = Counter[str | None]()
    while driver.queue:
        waiting = driver.state.queues.first_waiting(1)
        sample = take(driver, sampler)
        if waiting and driver.state.queues.first_waiting(1) == waiting and sample.next is not None:
            reasons[sample.next.blocked_by] += 1
            assert sample.next.prompt_tokens == len(waiting[0].prompt)
            assert sample.next.fits_in_steps is not None
            key = waiting[0].request.request_id, waiting[0].index
            predicted.setdefault(key, []).append((driver.state.next_step_id, sample.next.fits_in_steps))
        driver.step([], 1)
        for sequence in driver.running():
            admitted.setdefault((sequence.request.request_id, sequence.index), driver.state.next_step_id)
    assert reasons["blocks"] > 10
    errors = [
        admitted[key] - step - fits_in_steps
        for key, predictions in predicted.items()
        for step, fits_in_steps in predictions
    ]
    # Not always: cached blocks come and go, and prompts that run now have been computed by then.
    assert np.median(np.abs(errors)) <= 1
    assert np.mean(np.abs(errors) <= STEPS_AHEAD) > 0.95
    driver.assert_nothing_is_left()


def test_why_the_next_sequence_waits() -> None:
    driver, sampler = quick_driver(0, max_tokens_per_forward=12), LiveSampler()
    requests = [make_request(number, 5, max_new_tokens=20, ignore_eos=True) for number in range(3)]
    driver.step([make_request(99, 5, num_sequences=12, max_new_tokens=6, ignore_eos=True)])
    assert driver.state.slots.free == []
    driver.step(requests)
    sample = take(driver, sampler)
    assert sample.next is not None
    assert (sample.next.blocked_by, sample.next.prompt_tokens) == ("slots", 5)
    assert sample.next.fits_in_steps is not None
    assert sample.next.fits_in_steps > 0
    assert sample.next.blocks == -(-(5 + 20 - 1) // 4)
    assert sample.oldest_wait_s is not None
    assert sample.oldest_wait_s == pytest.approx(sample.next.wait_seconds, abs=0.5)
    driver.run_until_idle()
    driver.step([Pause(1, aborts=False), *(make_request(number, 5, ignore_eos=True) for number in range(5, 8))])
    sample = take(driver, sampler)
    assert sample.next is not None
    assert sample.next.blocked_by == "paused"
    assert (sample.forecast, sample.stats.num_waiting) == (None, 3)
    driver.step([Resume(2)])
    driver.run_until_idle()
    sample = take(driver, sampler)
    assert (sample.next, sample.oldest_wait_s, sample.forecast, sample.time_left) == (None, None, None, None)


@pytest.mark.parametrize("seed", range(6))
def test_the_oldest_requests_are_the_first_that_came_of_those_that_run_and_wait(seed: int) -> None:
    driver, sampler = quick_driver(seed, max_tokens_per_forward=24), LiveSampler()
    rng = Random(seed)
    requests = [replace(one, job="a job") for one in random_requests(rng, 60, driver.options)]
    came: list[GenerateRequest] = []
    seen: Counter[str] = Counter()
    while requests or driver.state.queues.num_waiting:
        new = [requests.pop(0) for _ in range(rng.randint(0, 6)) if requests]
        came += new
        driver.step(new, rng.randint(0, 2))
        if rng.random() < 0.5:
            continue
        oldest = take(driver, sampler).oldest
        running: dict[str, list[Sequence]] = {}
        for sequence in driver.running():
            running.setdefault(sequence.request.request_id, []).append(sequence)
        left = [one for one in came if one.request_id in driver.state.unfinished]
        runs, waits = (
            [one for one in left if (one.request_id in running) is is_running] for is_running in (True, False)
        )
        expected = [*runs[:MAX_OLD_REQUESTS], *waits[:MAX_OLD_REQUESTS]]
        assert [one.id for one in oldest] == [one.request_id for one in expected]
        num_sampled: Counter[str] = Counter()
        for progress in running_progress(driver.state):
            num_sampled[progress.request_id] += max(0, progress.num_tokens)
        for one, request in zip(oldest, expected, strict=True):
            phases = {sequence.phase for sequence in running.get(request.request_id, [])}
            state = "waiting" if not phases else "prefilling" if phases == {Phase.PREFILL} else "running"
            assert (one.state, one.running) == (state, len(running.get(request.request_id, [])))
            assert (one.samples, one.prompt_tokens) == (request.num_sequences, len(request.prompt_ids))
            assert one.generated_tokens >= num_sampled[request.request_id]
            if all(sequence.phase is not Phase.WAITING for sequence in driver.state.unfinished[one.id].sequences):
                assert one.generated_tokens == num_sampled[request.request_id]
            assert 0 <= one.wait_seconds <= one.age_seconds
            seen[state] += 1
    assert min(seen[state] for state in ("waiting", "running")) > 20
    driver.run_until_idle()
    assert take(driver, sampler).oldest == ()


@pytest.mark.parametrize("seed", range(6))
def test_clients_are_counted_if_they_are_asked_for(seed: int) -> None:
    """With preempted, background and cancelled requests, and with samples that are not created yet."""
    options = make_options(16, 4, scheduling_steps_ahead=STEPS_AHEAD, max_seqs_per_forward=12)
    driver, sampler = make_quick_driver(options, seed, EndsNext()), LiveSampler()
    rng = Random(seed)
    requests = [
        replace(one, client=rng.choice("abc"), is_background=rng.random() < 0.3, ignore_eos=False)
        for one in random_requests(rng, 60, driver.options)
    ]
    num_told = 0
    while requests or driver.state.queues.num_waiting:
        new = [requests.pop(0) for _ in range(rng.randint(0, 6)) if requests]
        cancelled = [CancelRequest(one.request_id) for one in new if rng.random() < 0.2]
        driver.step([*new, *cancelled], rng.randint(0, 2))
        assert take(driver, sampler).clients == ()
        driver.step([TakeSample(begins=False, counts_clients=True)])
        sample = sampler.take(driver.state, driver.state.stats(), {})
        running = Counter(sequence.request.client for sequence in driver.running())
        waiting = Counter[str]()
        for samples in driver.state.unfinished.values():
            left = [one for one in samples.sequences if one.phase is Phase.WAITING]
            waiting[samples.request.client] += samples.num_to_create + len(left)
        told = {one.client: (one.num_running, one.num_waiting) for one in sample.clients}
        assert len(told) == len(sample.clients)
        expected = {client: (running[client], waiting[client]) for client in "abc"}
        assert {client: told.get(client, (0, 0)) for client in "abc"} == expected
        assert sum(one.num_waiting for one in sample.clients) == sample.stats.num_waiting
        num_told += len(told)
    assert num_told > 20
    assert driver.state.totals.preemptions > 0
    driver.run_until_idle()


def test_events_and_lengths_count_from_one_sample_to_the_next() -> None:
    driver, sampler = quick_driver(1, num_blocks=24), LiveSampler()
    first = take(driver, sampler, begins=True)
    assert (first.events.admitted, first.events.finished, first.num_steps, first.lengths) == (0, 0, 0, [])
    counts, lengths = Counter[str](), []
    for first_number in (0, 20, 40):
        shapes = [
            make_request(first_number + number, 9, num_sequences=2, max_new_tokens=3 + number, ignore_eos=True)
            for number in range(12)
        ]
        driver.step(shapes)
        driver.run_until_idle()
        sample = take(driver, sampler)
        lengths += sample.lengths
        counts.update(asdict(sample.events) | {"steps": sample.num_steps})
    assert counts["finished"] == 3 * 24
    assert counts["preempted"] == driver.state.stats().total_preemptions
    assert counts["admitted"] == 3 * 24 + counts["preempted"]
    assert counts["evicted"] > 0
    assert counts["steps"] == driver.state.step_totals.num_steps
    assert Counter(lengths) == Counter({(3 + number, 3 + number): 6 for number in range(12)}), "all end at max_tokens"
    driver.step([make_request(70 + number, 9, max_new_tokens=2, ignore_eos=True) for number in range(100)])
    driver.run_until_idle()
    again = take(driver, sampler, begins=True)
    assert (again.events.admitted, again.events.finished, again.num_steps) == (0, 0, 0)
    assert again.lengths == [(2, 2)] * 64, "the newest"
    assert again.busy_seconds == 0
    assert set(again.manager_seconds.values()) <= {0.0}


def test_a_sample_waits_while_the_worker_needs_steps_but_not_for_long() -> None:
    driver, sampler = quick_driver(3), LiveSampler()
    driver.step([TakeSample(begins=True)])
    assert sampler.is_due(driver.state, 0.0, now_s=1.0), "nothing runs"
    sampler.take(driver.state, driver.state.stats(), {})
    sampler._seconds = 0.01
    driver.step([make_request(0), TakeSample(begins=False)])
    assert not sampler.is_due(driver.state, 0.0, now_s=2.0)
    assert sampler.is_due(driver.state, 0.03, now_s=2.0), "the worker is busy for long enough"
    assert not sampler.is_due(driver.state, 0.0, now_s=2.0 + 0.9 * MAX_WAIT_SECONDS)
    assert sampler.is_due(driver.state, 0.0, now_s=2.0 + 1.1 * MAX_WAIT_SECONDS)


def test_a_large_engine_is_sampled_in_milliseconds() -> None:
    driver, sampler = (
        make_quick_driver(make_options(60_000, 16, max_seqs_per_forward=2048, max_tokens_per_forward=2048)),
        LiveSampler(),
    )
    rng = np.random.default_rng(0)
    for number in range(2048):
        driver.engine.step([make_request(number, 64, max_new_tokens=int(rng.integers(100, 2000)))], [])
    assert driver.state.slots.num_running > 1000
    take(driver, sampler)
    seconds = []
    for _ in range(5):
        driver.engine.step([TakeSample(begins=False)], [])
        started = time.process_time()
        sampler.take(driver.state, driver.state.stats(), {})
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.05


def test_stages_have_the_times_since_the_sample_before_and_the_steps_between_them() -> None:
    board = StageBoard(2)
    driver, sampler = quick_driver(0), LiveSampler(board)
    board.write(0, StageTotals(0, 5.0, 1.0))
    assert take(driver, sampler, begins=True).stages == (LiveStage(0.0, 0.0, 0), LiveStage(0.0, 0.0, 0))
    driver.step([make_request(0, 4, 1, 20, ignore_eos=True)], 0)
    driver.step([], 0)
    sent = driver.state.next_step_id
    assert sent >= 2
    board.write(0, StageTotals(sent - 1, 5.75, 1.125))
    board.write(1, StageTotals(sent - 2, 0.5, 0.25))
    sample = take(driver, sampler)
    waiting = driver.state.next_step_id - (sent - 1)
    assert sample.stages == (LiveStage(0.75, 0.125, waiting), LiveStage(0.5, 0.25, 1))
    while driver.queue:
        driver.step([], 1)
    assert [stage.microbatches for stage in take(driver, sampler).stages] == [0, 0], "nothing is in flight"
    assert take(driver, LiveSampler()).stages == ()
