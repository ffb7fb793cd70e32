"""The model of speed: how long completions become, how many steps they take, and what a step costs."""

import heapq
import random

import pytest

from tokasaurus.messages.status import StepCost
from tokasaurus.monitoring.time_left import Done, Lengths, Pace, Sample, Work, lengths_to_come, time_left


@pytest.mark.parametrize("seed", range(5))
def test_the_pace_is_that_of_about_the_last_minute(seed: int) -> None:
    chance = random.Random(seed)
    pace, notes = Pace(), []
    done = Done(0.0, 9000, 40, 7)  # from a former run: they count for nothing
    for _ in range(200):
        notes.append(done)
        pace.note(done)
        steps = (chance.uniform(0.1, 3), chance.randint(10, 900), chance.randint(1, 9), chance.randint(0, 50))
        done = Done(*(old + new for old, new in zip(done, steps, strict=True)))
    first = [note for note in notes if notes[-1].time_s - note.time_s >= 60][-1]
    assert pace.lately == pytest.approx([new - old for old, new in zip(first, notes[-1], strict=True)])
    assert pace.tokens_per_s() == pytest.approx(pace.lately.num_tokens / pace.lately.time_s)
    assert pace.age_s == notes[-1].time_s


def test_a_young_pace_is_that_of_the_last_half() -> None:
    pace = Pace()
    for second in range(41):
        pace.note(Done(second, max(0, second - 20) * 100))
    assert pace.tokens_per_s() == 100


def test_tokens_that_a_dead_engine_generates_again_do_not_count_twice() -> None:
    pace = Pace()
    for second, num_tokens in enumerate((0, 100, 200, 0, 100, 200, 300, 400)):
        pace.note(Done(second / 4, num_tokens))
    assert pace.tokens_per_s() == pytest.approx(400 / 1.75)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["even", "exponential", "two lengths"])
def test_the_mean_length_counts_those_that_run(kind: str, seed: int) -> None:
    """The ended ones alone are the shortest: their mean is wrong, while most run."""
    chance = random.Random(f"{kind} {seed}")
    draw = {
        "even": lambda: chance.randint(50, 250),
        "exponential": lambda: 1 + round(chance.expovariate(1 / 120)),
        "two lengths": lambda: chance.choice((60, 240)),
    }[kind]
    ages = [(draw(), chance.randint(1, 400)) for _ in range(2_000)]  # (length, tokens that it could have had by now)
    ended = [length for length, age in ages if length <= age]
    running = [age for length, age in ages if length > age]
    true = sum(length for length, _ in ages) / len(ages)
    assert Lengths(ended, running, 1_000).mean() == pytest.approx(true, rel=0.1)
    assert sum(ended) / len(ended) < 0.95 * true


def test_a_length_to_come_is_longer_than_what_is_there_and_at_most_the_limit() -> None:
    chance = random.Random(0)
    lengths = Lengths([chance.randint(1, 50) for _ in range(30)], [chance.randint(1, 90) for _ in range(30)], 100)
    for start in range(0, 99, 3):
        finals = [lengths.final(share, start, 100) for share in (1.0, 0.9, 0.5, 0.1, 0.001)]
        assert finals == sorted(finals), "few outlast many"
        assert start < finals[0]
        assert finals[-1] <= 100
    assert Lengths([], [10] * 50, 100).mean() > 90, "nothing has ended"
    assert Lengths([20] * 50, [10] * 3, 100).mean() == 20


@pytest.mark.parametrize("sign", [1, -1])
def test_sorted_rows_become_longer_or_shorter_and_others_do_not(sign: int) -> None:
    chance = random.Random(sign)
    lengths = [300 + sign * number // 4 for number in range(800)]
    ended = [Sample(number, length, has_ended=True) for number, length in enumerate(lengths[:400])]
    found, factor = lengths_to_come(ended, 1_000, 600)
    assert factor * found.mean() == pytest.approx(lengths[600], rel=0.05)
    for _ in range(50):
        chance.shuffle(lengths)
        ended = [Sample(number, length, has_ended=True) for number, length in enumerate(lengths[:400])]
        found, factor = lengths_to_come(ended, 1_000, 600)
        assert factor == 1.0
        assert found.mean() == pytest.approx(300 + sign * 100, rel=0.05)


def steps_of(running: list[int], waiting: list[int], num_at_once: int) -> int:
    """The oracle: whenever one ends, the next one begins."""
    ends = [*running, *[0] * (num_at_once - len(running))]
    heapq.heapify(ends)
    for length in waiting:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@pytest.mark.parametrize("seed", range(8))
def test_steps_until_the_last_completion_ends(seed: int) -> None:
    chance = random.Random(seed)
    num_at_once, num_waiting = chance.choice((1, 7, 64, 700)), chance.choice((0, 5, 300, 3_000))
    running = [chance.randint(1, 100) for _ in range(num_at_once)]
    waiting = [chance.randint(1, 100) for _ in range(num_waiting)]
    work = Work(running, num_waiting, waiting or [1], num_at_once)
    assert work.num_steps() == pytest.approx(steps_of(running, waiting, num_at_once), rel=0.12)
    assert work.num_tokens == pytest.approx(sum(running) + sum(waiting))


def test_the_time_left_is_the_cost_of_what_is_left_at_the_speed_of_what_was_done() -> None:
    pace, cost = Pace(), StepCost(0.1, 0.001, 0.002)
    assert time_left(Work([10.0]), pace, cost) is None
    pace.note(Done(0.0))
    assert time_left(Work([10.0]), pace, cost) is None
    pace.note(Done(30.0, 2_000, 50, 4_000))  # 5 + 2 + 8 seconds by the costs: it took twice as long
    left = time_left(Work([40.0, 20.0], num_prompt_tokens=1_000), pace, cost)
    assert left is not None
    assert left.middle_s == pytest.approx(2 * (4 + 0.06 + 2))
    assert left.low_s < left.middle_s < left.high_s
    unsure = time_left(Work([40.0, 20.0], num_prompt_tokens=1_000, error=0.5), pace, cost)
    assert unsure is not None
    assert unsure.middle_s == pytest.approx(left.middle_s)
    assert unsure.high_s / unsure.low_s > 2 > left.high_s / left.low_s
