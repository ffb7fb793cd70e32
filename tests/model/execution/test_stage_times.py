"""What a stage counts, against a simulated device that runs behind the host."""

import random

import pytest

from tokasaurus.messages.stages import StageBoard
from tokasaurus.model.execution.stage_times import StageTimes
from tokasaurus.model.staging.staging import Mark


class Device:
    """Passes marks in order; its clock advances by the work between them."""

    def __init__(self) -> None:
        self.launched_s = 0.0
        """When it will have passed all that is launched."""
        self.now_s = 0.0

    def mark(self) -> "DeviceMark":
        return DeviceMark(self, self.launched_s)


class DeviceMark:
    def __init__(self, device: Device, at_s: float) -> None:
        self._device = device
        self._at_s = at_s

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, DeviceMark)
        assert self.is_reached(), "asked before the device was here"
        return self._at_s - earlier._at_s

    def is_reached(self) -> bool:
        return self._at_s <= self._device.now_s


@pytest.mark.parametrize("seed", range(10))
def test_steps_count_when_the_device_has_passed_them_and_times_only_while_somebody_watches(seed: int) -> None:
    rng = random.Random(seed)
    device, board = Device(), StageBoard(3)
    times = StageTimes(board, 1, device.mark)
    board.look()
    ends: list[tuple[float, float, float]] = []
    for _ in range(50):
        times.begin()
        busy_s = waited_s = 0.0
        for _ in range(rng.randint(0, 3)):
            busy_s += (work_s := rng.random())
            device.launched_s += work_s
            with times.waiting():
                waited_s += (work_s := rng.random())
                device.launched_s += work_s
        busy_s += 1.0
        device.launched_s += 1.0
        device.now_s = rng.uniform(device.now_s, device.launched_s)
        times.end()
        ends.append((device.launched_s, busy_s, waited_s))
        passed = [step for step in ends if step[0] <= device.now_s]
        first, totals, last = board.look()
        assert first == last
        assert totals.num_steps == len(passed)
        assert totals.busy_seconds == pytest.approx(sum(step[1] for step in passed))
        assert totals.waiting_seconds == pytest.approx(sum(step[2] for step in passed))


def test_without_anybody_who_watches_no_mark_is_made_and_steps_count() -> None:
    def refuse() -> Mark:
        raise AssertionError("a mark")

    board = StageBoard(1)
    times = StageTimes(board, 0, refuse)
    for _ in range(3):
        times.begin()
        with times.waiting():
            pass
        times.end()
    (totals,) = board.look()
    assert (totals.num_steps, totals.busy_seconds, totals.waiting_seconds) == (3, 0.0, 0.0)
    alone = StageTimes(None, 0, refuse)  # a model in one stage
    alone.begin()
    alone.end()
