"""When the work that can wait is done, on a clock that the test sets."""

import itertools
from types import SimpleNamespace

import pytest

from tests.manager.helpers.engine_driver import Bench, assert_equals_simulation, make_options
from tests.manager.helpers.fake_worker import make_request
from tokasaurus.manager.engine import engine
from tokasaurus.manager.engine.deferred_tasks import DeferredTask, may_run
from tokasaurus.messages.forward import ForwardInput

STEP_SECONDS = 0.01
NUM_AHEAD = 4
"""Steps of 10 ms that the manager keeps with the worker."""


def make_task(seconds: float, max_steps_deferred: int = 5, num_steps_deferred: int = 0) -> DeferredTask:
    return DeferredTask("work", lambda _: True, lambda _: None, max_steps_deferred, seconds, num_steps_deferred)


@pytest.mark.parametrize("mode", ["always", "deferred", None])
@pytest.mark.parametrize("num_steps_deferred", [0, 4, 5, 6])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("seconds_left", [0.0, 0.015, 0.025, 2.0])
def test_work_is_put_off_where_it_might_take_half_of_the_time_left(mode, num_steps_deferred, seconds, seconds_left):
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


def test_the_time_of_a_task_is_an_average_over_some_of_its_last_runs():
    task = make_task(0.0, num_steps_deferred=3)
    for _ in range(30):
        task.note_run(0.1)
    assert task.seconds == pytest.approx(0.1, rel=0.01)
    assert task.num_steps_deferred == 0
    task.note_run(1.0)
    assert 0.1 < task.seconds < 0.5


class SteppedBench(Bench):
    """The clock stands still but when a test moves it; `events` has what happened in which turn.

    Its tasks: "slow", which has work at all times and seems to take `slow_seconds`, and those of every engine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str | None, slow_seconds: float) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        self.events: list[tuple[str, int]] = []
        super().__init__(make_options(200, deferred_tasks=mode), (STEP_SECONDS,))
        self.state.step_seconds = STEP_SECONDS
        self.slow = DeferredTask("slow", lambda _: True, self.run_slow, 5, slow_seconds)
        self.engine.tasks.append(self.slow)

    def send(self, message: ForwardInput) -> None:
        super().send(message)
        self.events.append(("send", len(self.queue)))

    def run_slow(self, _: object) -> None:
        self.events.append(("run", len(self.queue)))
        self.now_s += self.slow.seconds

    def events_of_turn(self, *requests: object) -> list[tuple[str, int]]:
        self.events = []
        self.turn(requests, 1)
        return self.events


@pytest.mark.parametrize(
    ("mode", "slow_seconds", "num_put_off"),
    [
        ("always", 10.0, 0),
        ("deferred", 10.0, 5),
        ("deferred", 0.001, 5),
        (None, 10.0, 5),
        (None, 0.021, 5),
        (None, 0.001, 0),
    ],
)
def test_work_that_takes_long_is_done_behind_a_full_queue_and_at_the_latest_after_so_many_turns(
    monkeypatch, mode, slow_seconds, num_put_off
):
    bench = SteppedBench(monkeypatch, mode, slow_seconds)
    bench.events_of_turn(make_request(1, 5, 4, 60, ignore_eos=True))
    engine = [bench.events_of_turn() for _ in range(37)]
    for events in engine:
        assert events.count(("send", NUM_AHEAD)) == 1, "one step is done, one is sent"
        if slow_seconds > NUM_AHEAD * STEP_SECONDS:
            assert ("run", NUM_AHEAD - 1) not in events, "the step is sent first"
    did_run = ["run" in dict(events) for events in engine]
    gaps = [len(list(group)) for ran, group in itertools.groupby(did_run) if not ran]
    if num_put_off:
        assert set(gaps[1:-1]) == {num_put_off}
        assert max(gaps) == num_put_off
        assert did_run.count(True) == len(gaps) + did_run[0] - (not did_run[-1]), "and then at once"
    else:
        assert not gaps


@pytest.mark.parametrize("mode", ["always", "deferred", None])
def test_nothing_is_put_off_where_no_step_could_be_sent_without_it(monkeypatch, mode):
    """An idle engine admits a request in the turn in which it comes, however long admission seems to take."""
    bench = SteppedBench(monkeypatch, mode, 0.0)
    for task in bench.engine.tasks:
        task.seconds = 60.0
    request = make_request(1, 5, 4, 20, ignore_eos=True)
    assert ("send", 1) in bench.events_of_turn(request)
    bench.run_until_idle()
    assert_equals_simulation(bench.deltas, [request])


def test_work_is_put_off_when_the_step_that_runs_is_nearly_done(monkeypatch):
    """The time left shrinks while the worker computes, though the queue is as long as before."""
    bench = SteppedBench(monkeypatch, None, 0.012)
    bench.events_of_turn(make_request(1, 5, 4, 60, ignore_eos=True))
    for seconds_since_result, expected in [(0.0, True), (0.015, True), (0.017, False)]:
        bench.slow.has_work = lambda _: False
        bench.events_of_turn()
        bench.now_s += seconds_since_result
        bench.slow.has_work, bench.slow.seconds = lambda _: True, 0.012
        bench.events = []
        bench.turn()
        assert [name for name, _ in bench.events] == ["run"] * expected


@pytest.mark.parametrize("mode", ["always", "deferred", None])
def test_the_mode_changes_no_token(mode):
    requests = [make_request(n, 9, 3, 30, ("ab",) if n % 2 else ()) for n in range(6)]
    bench = Bench(make_options(30, deferred_tasks=mode))
    bench.turn(requests)
    bench.run_until_idle()
    assert_equals_simulation(bench.deltas, requests)
    assert len(bench.deltas) == 18
