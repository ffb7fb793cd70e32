"""What trials of prefix groups teach, on devices whose groups cost more or less than was measured."""

import random

import pytest

from tests.helpers.examples import few, seeds
from tokasaurus.manager.planning.prefix_groups import FIRST_INTERVAL, MAX_INTERVAL, GroupTrial, GroupTrials


class Device:
    """Decode steps of 64 rows. Attention of separate rows takes 40 % of a step without groups.

    true_scale: what groups really cost, over what was measured. noise: standard deviation of a step's time. spikes:
    share of the steps that take 10 times as long."""

    def __init__(self, true_scale: float, seed: int = 0, noise: float = 0.02, spikes: float = 0.0) -> None:
        self.true_scale, self.rng = true_scale, random.Random(seed)
        self.noise, self.spikes = noise, spikes

    def seconds(self, ratio: float, has_groups: bool) -> float:
        attention = 0.4 * (self.true_scale / ratio if has_groups else 1.0)
        noise = self.rng.gauss(1.0, self.noise) * (10.0 if self.rng.random() < self.spikes else 1.0)
        return 0.02 * (0.6 + attention) * noise


def serve(device: Device, ratios: list[float], num_steps: int) -> tuple[GroupTrials, list[int], float]:
    """Steps with one sharing of prefixes after another for 1,000 steps each. ratios: time of the rows alone over their
    measured time in groups. Returns the trials, their steps, and the time over that of the better choice."""
    trials, made, taken, best = GroupTrials(), [], 0.0, 0.0
    for step in range(num_steps):
        ratio = ratios[step // 1000 % len(ratios)]
        has_groups, trial = ratio > trials.scale, None
        if trials.is_due():
            trials.begin()
            made.append(step)
            has_groups = not has_groups
            trial = GroupTrial(has_groups, alone=1000.0 * ratio, together=1000.0)
        seconds = device.seconds(ratio, has_groups)
        taken += seconds
        best += 0.02 * min(1.0, 0.6 + 0.4 * device.true_scale / ratio)
        trials.note(64, False, trial, seconds)
    return trials, made, taken / best


@few(2, "seed", range(5))
@pytest.mark.parametrize("true_scale", [0.2, 0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("spikes", [0.0, 0.02])
def test_the_choice_becomes_right_whatever_was_measured(true_scale: float, spikes: float, seed: int) -> None:
    for ratio in (0.4, 1.4, 3.0, 12.0):
        if abs(true_scale / ratio - 1) < 0.2:
            continue  # either choice takes about as long
        trials, _, _ = serve(Device(true_scale, seed, spikes=spikes), [ratio], 20_000)
        assert (ratio > trials.scale) == (ratio > true_scale)


@pytest.mark.parametrize("seed", range(5))
def test_right_measurements_stay_as_they_are(seed: int) -> None:
    trials, made, excess = serve(Device(1.0, seed, noise=0.05, spikes=0.01), [4.0, 0.4, 2.0], 30_000)
    assert trials.scale == 1.0
    assert len(made) < 20
    assert excess < 1.13  # 1 % of the steps take 10 times as long, whatever is chosen


def test_trials_that_confirm_the_choice_become_rare_and_cost_little() -> None:
    _, made, excess = serve(Device(1.0, noise=0.0), [8.0], 50_000)
    gaps = [after - before for before, after in zip([0, *made], made, strict=False)]
    assert FIRST_INTERVAL <= gaps[0] <= FIRST_INTERVAL + 1
    assert all(MAX_INTERVAL <= gap <= MAX_INTERVAL + 1 for gap in gaps[5:])
    assert excess < 1.001


def note_trial(trials: GroupTrials, usual_s: float, without_groups_s: float) -> bool:
    """A trial that does without groups, between two steps with them; whether the scale has changed."""
    trials.note(64, False, None, usual_s)
    trials.note(64, False, GroupTrial(False, 3000.0, 1000.0), without_groups_s)
    return trials.note(64, False, None, usual_s)


@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize("num_disturbed", [1, 2])
def test_few_disturbed_trials_change_nothing(num_before: int, num_disturbed: int) -> None:
    trials = GroupTrials()
    for seconds in [0.014] * num_before + [0.001] * num_disturbed + [0.014] * 3:
        assert not note_trial(trials, 0.01, seconds)
    assert trials.scale == 1.0


@pytest.mark.parametrize("ratio", [0.4, 0.7, 1.4, 3.0])
@pytest.mark.parametrize("seed", seeds(10))
def test_a_busy_machine_makes_the_same_choice_at_each_start(ratio: float, seed: int) -> None:
    trials, _, _ = serve(Device(1.0, seed, noise=0.15, spikes=0.05), [ratio], 10_000)
    assert (ratio > trials.scale) == (ratio > 1.0)


@pytest.mark.parametrize(
    "neighbour", [{"num_rows": 50}, {"has_prefill": True}, {"trial": GroupTrial(True, 2000.0, 1000.0)}]
)
@pytest.mark.parametrize("is_before", [False, True])
def test_only_steps_that_are_alike_are_compared(neighbour: dict[str, object], is_before: bool) -> None:
    plain = {"num_rows": 64, "has_prefill": False, "trial": None}
    before, after = plain | (neighbour if is_before else {}), plain | ({} if is_before else neighbour)
    trials = GroupTrials()
    for _ in range(5):
        trials.note(**before, seconds=0.01)
        trials.note(64, False, GroupTrial(False, 3000.0, 1000.0), 0.002)
        assert not trials.note(**after, seconds=0.01)
    assert [note_trial(trials, 0.01, 0.002) for _ in range(3)] == [False, False, True], "groups take five times as long"
    assert trials.scale > 3.0
