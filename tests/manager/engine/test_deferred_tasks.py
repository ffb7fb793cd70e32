"""Tests when deferred tasks run, on a clock that the test controls."""

import itertools
from types import SimpleNamespace

import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import assert_equals_simulation
from tokasaurus.manager.engine import engine
from tokasaurus.manager.engine.engine import DeferredTask, may_run
from tokasaurus.messages.forward import ForwardInput

STEP_SECONDS = 0.01
NUM_AHEAD = 4
"""Steps of 10 ms that the manager keeps in flight."""


def make_task(seconds: float, max_steps_deferred: int = 5, num_steps_deferred: int = 0) -> DeferredTask:
    return DeferredTask("work", lambda _: True, lambda _: None, max_steps_deferred, seconds, num_steps_deferred)


@pytest.mark.parametrize("mode", ["always", "deferred", None])
@pytest.mark.parametrize("num_steps_deferred", [0, 4, 5, 6])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("seconds_left", [0.0, 0.015, 0.025, 2.0])
def test_a_task_is_deferred_when_it_might_take_half_of_the_time_left(mode, num_steps_deferred, seconds, seconds_left):
    is_overdue = num_steps_deferred in (5, 6)
    is_short = (seconds, seconds_left) in {
        (0.0, 0.015),
        (0.0, 0.025),
        (0.0, 2.0),
        (0.01, 0.025),
        (0.01, 2.0),
        (0.5, 2.0),
    }
    expected = is_overdue or mode == "always" or (mode is None and is_short)
    assert may_run(make_task(seconds, 5, num_steps_deferred), seconds_left, mode) is expected


def test_the_seconds_of_a_task_are_a_moving_average_of_its_runs():
    task = make_task(0.0, num_steps_deferred=3)
    for _ in range(30):
        task.note_run(0.1)
    assert task.seconds == pytest.approx(0.1, rel=0.01)
    assert task.num_steps_deferred == 0
    task.note_run(1.0)
    assert 0.1 < task.seconds < 0.5


class SteppedDriver(EngineDriver):
    """A driver whose clock moves only when a test moves it.

    Besides every engine's tasks it has the task "slow", which always has work and seems to take `slow_seconds`.
    events: ("send" or "run", steps in the queue) of the last step; "run" is a run of "slow".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str | None, slow_seconds: float) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.events: list[tuple[str, int]] = []
        super().__init__(make_options(200, deferred_tasks=mode), (STEP_SECONDS,))
        self.assume_step_seconds(STEP_SECONDS)
        self.slow = DeferredTask("slow", lambda _: True, self.run_slow, 5, slow_seconds)
        self.engine.tasks.append(self.slow)

    def send(self, message: ForwardInput) -> None:
        super().send(message)
        self.events.append(("send", len(self.queue)))

    def run_slow(self, _: object) -> None:
        self.events.append(("run", len(self.queue)))
        self.now_s += self.slow.seconds

    def events_of_step(self, *requests: object) -> list[tuple[str, int]]:
        self.events = []
        self.step(requests, 1)
        return self.events


@pytest.mark.parametrize(
    ("mode", "slow_seconds", "num_steps_deferred"),
    [
        ("always", 10.0, 0),
        ("deferred", 10.0, 5),
        ("deferred", 0.001, 5),
        (None, 10.0, 5),
        (None, 0.021, 5),
        (None, 0.001, 0),
    ],
)
def test_a_long_task_runs_after_the_step_is_sent_and_within_max_steps_deferred(
    monkeypatch, mode, slow_seconds, num_steps_deferred
):
    driver = SteppedDriver(monkeypatch, mode, slow_seconds)
    driver.events_of_step(make_request(1, 5, 4, 60, ignore_eos=True))
    events_per_step = [driver.events_of_step() for _ in range(37)]
    for events in events_per_step:
        assert events.count(("send", NUM_AHEAD)) == 1, "one result arrives, one step is sent"
        if slow_seconds > NUM_AHEAD * STEP_SECONDS:
            assert ("run", NUM_AHEAD - 1) not in events, "the step is sent first"
    did_run = ["run" in dict(events) for events in events_per_step]
    gaps = [len(list(group)) for ran, group in itertools.groupby(did_run) if not ran]
    if num_steps_deferred:
        assert set(gaps[1:-1]) == {num_steps_deferred}
        assert max(gaps) == num_steps_deferred
        assert did_run.count(True) == len(gaps) + did_run[0] - (not did_run[-1]), "an overdue task runs at once"
    else:
        assert not gaps


@pytest.mark.parametrize("mode", ["always", "deferred", None])
def test_no_task_is_deferred_when_no_step_could_be_sent_without_it(monkeypatch, mode):
    """An idle engine admits a request in the step in which it arrives, however long admission seems to take."""
    driver = SteppedDriver(monkeypatch, mode, 0.0)
    for task in driver.engine.tasks:
        task.seconds = 60.0
    request = make_request(1, 5, 4, 20, ignore_eos=True)
    assert ("send", 1) in driver.events_of_step(request)
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, [request])


def test_a_task_is_deferred_when_the_running_step_is_nearly_done(monkeypatch):
    """The time left decreases while the worker computes, although the queue length stays the same."""
    driver = SteppedDriver(monkeypatch, None, 0.012)
    driver.events_of_step(make_request(1, 5, 4, 60, ignore_eos=True))
    for seconds_since_result, expected in [(0.0, True), (0.015, True), (0.017, False)]:
        driver.slow.has_work = lambda _: False
        driver.now_s += 1
        driver.step()  # sees no result, so the next one has only just arrived
        driver.events_of_step()
        driver.now_s += seconds_since_result
        driver.slow.has_work, driver.slow.seconds = lambda _: True, 0.012
        driver.events = []
        driver.step()
        assert [name for name, _ in driver.events] == ["run"] * expected


@pytest.mark.parametrize("mode", ["always", "deferred", None])
def test_the_mode_changes_no_token(mode):
    requests = [make_request(n, 9, 3, 30, ("ab",) if n % 2 else ()) for n in range(6)]
    driver = EngineDriver(make_options(30, deferred_tasks=mode))
    driver.step(requests)
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 18


def test_a_round_that_applies_several_results_defers_a_task_by_as_many_steps(monkeypatch):
    driver = SteppedDriver(monkeypatch, "deferred", 0.001)
    driver.events_of_step(make_request(1, 5, 4, 60, ignore_eos=True))
    runs = []
    for _ in range(13):
        driver.events = []
        driver.step([], 2)
        runs.append(sum(name == "run" for name, _ in driver.events))
    assert runs[:12] == [0, 0, 0, 1] * 3, "it is deferred by 2, 4 and 6 steps, and 5 are allowed"
