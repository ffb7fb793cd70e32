"""When streams get deltas, on a clock that the test controls."""

import itertools
import math
from types import SimpleNamespace

import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request, streamed
from tests.manager.helpers.simulation import assert_equals_simulation, join, simulate
from tokasaurus.manager.engine import outputs
from tokasaurus.manager.engine.outputs import STREAM_SECONDS


class StreamDriver(EngineDriver):
    """A driver whose clock for streams moves by `step_s` before each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.now_s, self.step_s = 50.0, step_s
        monkeypatch.setattr(outputs, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        super().__init__(make_options(80, deferred_tasks="always"), (0.01,))

    def tokens_of_step(self) -> list[list[int]]:
        self.now_s += self.step_s
        return [delta.token_ids for delta in self.step([], 1)]


@pytest.mark.parametrize(("step_s", "num_tokens"), [(0.0011, 19), (0.0041, 5), (0.0101, 2), (0.021, 1), (0.5, 1)])
def test_the_first_token_is_sent_at_once_and_later_ones_together(monkeypatch, step_s, num_tokens) -> None:
    request = streamed(make_request(3, 5, 1, 50, ignore_eos=True, want_logprobs=True))
    driver = StreamDriver(monkeypatch, step_s)
    driver.step([request])
    expected = simulate(request, 0)[0]
    sent: list[int] = []
    num_since = num_tokens - 1  # the first token need not wait
    for position in range(50):
        (tokens,) = driver.tokens_of_step() or [[]]
        num_since += 1
        if num_since == num_tokens or position == 49:
            sent += expected[len(sent) : position + 1]
            assert tokens == sent[len(sent) - len(tokens) :]
            assert len(tokens) >= 1
            num_since = 0
        else:
            assert tokens == []
    assert sent == expected
    assert_equals_simulation(join(driver.deltas), [request])


def test_it_is_known_when_unsent_tokens_are_due(monkeypatch) -> None:
    """The manager wakes then, even if no result arrives."""
    request = streamed(make_request(3, 5, 1, 50, ignore_eos=True))
    driver = StreamDriver(monkeypatch, 0.001)
    driver.step([request])
    assert len(driver.tokens_of_step()) == 1
    first_s = driver.now_s
    assert driver.state.stream_due_s == math.inf
    assert driver.tokens_of_step() == []
    assert driver.state.stream_due_s == pytest.approx(first_s + STREAM_SECONDS)
    driver.now_s = driver.state.stream_due_s
    assert [len(delta.token_ids) for delta in driver.step()] == [1]
    assert driver.state.stream_due_s == math.inf


def test_streams_that_began_at_different_times_keep_their_own_times(monkeypatch) -> None:
    requests = [streamed(make_request(n, 5, 1, 50, ignore_eos=True)) for n in range(2)]
    driver = StreamDriver(monkeypatch, 0.0041)
    driver.step(requests[:1])
    driver.tokens_of_step()
    driver.tokens_of_step()
    driver.step(requests[1:])
    times: dict[str, list[float]] = {"r0": [], "r1": []}
    while driver.queue:
        driver.now_s += driver.step_s
        for delta in driver.step([], 1):
            times[delta.request_id].append(driver.now_s)
    for found in times.values():
        assert len(found) >= 50 // 6
        assert all(STREAM_SECONDS <= later - earlier < 0.0281 for earlier, later in itertools.pairwise(found[:-1]))
    assert set(times["r0"]) != set(times["r1"])
    assert_equals_simulation(join(driver.deltas), requests)


def test_nothing_is_due_after_the_last_stream_has_ended(monkeypatch) -> None:
    """Otherwise an idle manager would wake every two milliseconds."""
    driver = StreamDriver(monkeypatch, 0.001)
    driver.step([streamed(make_request(3, 5, 1, 5, ignore_eos=True))])
    driver.tokens_of_step()
    driver.tokens_of_step()
    assert driver.state.stream_due_s < math.inf
    driver.run_until_idle()
    assert driver.state.stream_due_s == math.inf
