"""The time left of jobs, against what a simple engine takes, which runs step by step as the real one does."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.server.helpers.fake_engine import FakeEngine, hand_over
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, SequenceProgress
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import StepCost, TimeLeft
from tokasaurus.server.engine_client import client as client_module
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.pending import MAX_SAMPLES, JobPace, PendingRequest

MAX_TOKENS = 2_000
USUAL_COST = StepCost(0.02, 0.0005, 0.0002)


@dataclass
class Line:
    lengths: list[int]
    """Tokens of each sample."""
    num_prompt: int = 100
    num_cached: int = 0
    ignores_eos: bool = False


@dataclass
class Kind:
    """A kind of job, and the engine that runs it."""

    lines: list[Line]
    num_slots: int = 64
    cost: StepCost = USUAL_COST
    """What the steps really take."""
    believed: StepCost | None = None
    """What the manager believes of it; None: the same."""
    num_others: int = 0
    """Completions of other requests that run all the time."""
    slower_after: tuple[float, float] = (float("inf"), 1.0)
    """(seconds, factor)"""
    max_in_flight: int = 512
    chunk: int = 2_048
    """Most prompt tokens of a step."""


@dataclass
class Running:
    pending: PendingRequest
    index: int
    num_tokens: int
    prompt_left: int
    num_computed: int
    length: int


@dataclass
class Course:
    seconds: float = 0.0
    looks: list[tuple[float, TimeLeft | None]] = field(default_factory=list)

    def at(self, share: float) -> tuple[TimeLeft | None, float]:
        """(what was told, the truth) after this share of the time."""
        told = [look for look in self.looks if look[0] <= share * self.seconds]
        when, left = told[-1] if told else (0.0, None)
        return left, self.seconds - when


def request_of(number: int, line: Line) -> GenerateRequest:
    max_tokens = line.lengths[0] if line.ignores_eos else MAX_TOKENS
    prompt_ids = np.zeros(line.num_prompt, np.int32)
    fields = (SamplingParams(), 0, (), line.ignores_eos, False)
    return GenerateRequest(str(number), prompt_ids, len(line.lengths), max_tokens, *fields)


def delta_of(pending: PendingRequest, index: int, length: int, num_computed: int) -> SequenceDelta:
    request = pending.request
    num_cached = len(request.prompt_ids) - num_computed
    return SequenceDelta(request.request_id, index, [0] * length, None, "stop", num_cached, num_computed, 0, 0)


def run(kind: Kind) -> Course:
    """The job, step by step."""
    course, job = Course(), JobPace(len(kind.lines))
    lines, waiting = deque(enumerate(kind.lines)), deque[Running]()
    running: list[Running] = []
    open_lines: set[PendingRequest] = set()
    now_s, looked_s, num_slots = 0.0, 0.0, kind.num_slots - kind.num_others
    while lines or waiting or running:
        while lines and len(open_lines) < kind.max_in_flight:
            number, line = lines.popleft()
            pending = PendingRequest(request_of(number, line), None, 0)  # type: ignore[arg-type]
            open_lines.add(pending)
            job.begin_line()
            job.add(pending, now_s)
            for index, length in enumerate(line.lengths):
                num_computed = line.num_prompt - line.num_cached if index == 0 else 0
                waiting.append(Running(pending, index, 0, num_computed, num_computed, length))
        while waiting and len(running) < num_slots:
            running.append(waiting.popleft())
        budget, num_rows, num_prompt = kind.chunk, kind.num_others, 0
        for one in running:
            if one.prompt_left:
                part = min(one.prompt_left, budget)
                one.prompt_left -= part
                budget -= part
                num_prompt += part
                if one.prompt_left:
                    continue
            one.num_tokens += 1
            num_rows += 1
        seconds = kind.cost.per_step + kind.cost.per_row * num_rows + kind.cost.per_prompt_token * num_prompt
        now_s += seconds * (kind.slower_after[1] if now_s > kind.slower_after[0] else 1.0)
        for one in [one for one in running if one.num_tokens == one.length]:
            running.remove(one)
            delta = delta_of(one.pending, one.index, one.length, one.num_computed)
            one.pending.note_end(delta)
            job.note_end(one.pending, delta)
            if one.pending.num_unfinished == 0:
                job.remove(one.pending)
                open_lines.remove(one.pending)
                job.end_line()
                job.num_done += 1
        if now_s - looked_s >= 1.0:
            looked_s = now_s
            for one in running:
                progress = SequenceProgress(one.pending.request.request_id, one.index, one.num_tokens, None)
                one.pending.progress[one.index] = progress
            job.look(now_s, kind.believed or kind.cost)
            course.looks.append((now_s, job.time_left))
    course.seconds = now_s
    return course


def lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, min(MAX_TOKENS, round(median * rng.lognormvariate(0.0, sigma))))


def usual(rng: random.Random) -> int:
    return lognormal(rng, 100, 0.6)


def many(num: int, length: Callable[[random.Random], int], **fields: int) -> Callable[[random.Random], list[Line]]:
    return lambda rng: [Line([length(rng)], **fields) for _ in range(num)]


def by_length(rng: random.Random) -> list[Line]:
    return sorted(many(1_500, lambda rng: rng.randint(20, 200))(rng), key=lambda line: line.lengths[0])


def by_prompt(rng: random.Random) -> list[Line]:
    lines = [Line([rng.randint(5, 30)], rng.randint(20, 1_000)) for _ in range(1_000)]
    return sorted(lines, key=lambda line: line.num_prompt)


def second_half_cached(rng: random.Random) -> list[Line]:
    return many(400, usual)(rng) + many(400, usual, num_cached=96)(rng)


KINDS: dict[str, tuple[Callable[[random.Random], list[Line]], dict[str, Any]]] = {
    "uniform short": (many(2_000, lambda rng: rng.randint(20, 30)), {}),
    "long tail": (many(1_500, lambda rng: lognormal(rng, 60, 1.0)), {}),
    "8 samples with a prefix": (lambda rng: [Line([usual(rng) for _ in range(8)], 500) for _ in range(150)], {}),
    "long prompts, short answers": (many(400, lambda rng: rng.randint(5, 20), num_prompt=2_000), {}),
    "short prompts, long answers": (many(400, lambda rng: lognormal(rng, 500, 0.4), num_prompt=20), {}),
    "sorted, short answers first": (by_length, {}),
    "sorted, long answers first": (lambda rng: by_length(rng)[::-1], {}),
    "sorted, short prompts first": (by_prompt, {}),
    "sorted, long prompts first": (lambda rng: by_prompt(rng)[::-1], {}),
    "fewer rows than slots": (lambda _: [Line([500], 1_000, ignores_eos=True) for _ in range(30)], {}),
    "many more rows than slots": (many(4_000, lambda rng: lognormal(rng, 30, 0.5), num_prompt=50), {}),
    "beside other requests": (many(500, usual), {"num_others": 32}),
    "second half is cached": (second_half_cached, {}),
    "slower in the middle": (many(1_000, usual), {"slower_after": (60.0, 1.3)}),
    "costs of steps not known": (many(1_000, usual, num_prompt=300), {"believed": StepCost()}),
    "rows cost nothing": (
        many(4_000, lambda rng: lognormal(rng, 100, 0.4)),
        {"num_slots": 256, "cost": StepCost(0.02, 0.00001, 0.00005)},
    ),
    "rows cost all": (many(400, usual), {"num_slots": 16, "cost": StepCost(0.002, 0.004, 0.002)}),
}
MOST = {0.2: 1.5, 0.5: 1.5, 0.8: 2.5}
"""Most times too long or too short, by the share of the time that is over. At the end, one answer much longer than all
others may be what is left."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KINDS)
def test_the_time_left_is_within_a_factor_of_one_and_a_half(name: str, seed: int) -> None:
    make, fields = KINDS[name]
    course = run(Kind(make(random.Random(seed)), **fields))
    shown = f"{name:30s} {course.seconds:6.1f} s"
    factors = []
    for share in MOST:
        left, truth = course.at(share)
        assert left is not None, f"nothing is known after {share:.0%}"
        shown += f"   {share:.0%}: {left.low_s:6.1f} to {left.high_s:6.1f}, true {truth:6.1f}"
        factors.append(left.middle_s / truth)
    print(shown, *(f"{factor:.2f}" for factor in factors))
    assert all(1 / most < factor < most for factor, most in zip(factors, MOST.values(), strict=True)), shown


def test_nothing_is_told_before_the_number_of_lines_is_known_or_a_completion_has_ended() -> None:
    course = run(Kind([Line([400]) for _ in range(20)]))
    assert course.looks[0][1] is None
    assert {left for when, left in course.looks if when < 0.9 * course.seconds} == {None}
    job = JobPace()
    pending = PendingRequest(request_of(0, Line([5])), None, 0)  # type: ignore[arg-type]
    job.begin_line()
    job.add(pending, 0.0)
    pending.progress[0] = SequenceProgress("0", 0, 3, 5)
    job.look(1.0, StepCost())
    assert (job.num_running_tokens, job.num_tokens_left, job.time_left) == (3, None, None)
    job.num_lines = 10
    job.look(2.0, StepCost())
    assert job.num_tokens_left == 2 + 9 * 5, "the manager's expectation is a basis"
    assert job.time_left is not None


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_memory_is_bounded_and_a_look_is_quick_however_many_lines_there_are(num_sequences: int) -> None:
    job, rng = JobPace(200_000), random.Random(0)
    open_requests: deque[PendingRequest] = deque()
    for number in range(20_000):
        line = Line([usual(rng)] * num_sequences)
        pending = PendingRequest(request_of(number, line), None, 0)  # type: ignore[arg-type]
        job.begin_line()
        job.add(pending, 0.0)
        for index in range(num_sequences):
            pending.progress[index] = SequenceProgress(str(number), index, rng.randint(1, 80), None)
        open_requests.append(pending)
        if len(open_requests) > 1_000:
            ended = open_requests.popleft()
            for index in range(num_sequences):
                delta = delta_of(ended, index, usual(rng), 10)
                ended.note_end(delta)
                job.note_end(ended, delta)
            job.remove(ended)
            job.end_line()
            job.num_done += 1
    assert max(len(job._lengths), len(job._prompts)) <= MAX_SAMPLES
    job.look(60.0, StepCost(0.01, 0.001, 0.001))
    seconds = []
    for second in range(61, 66):
        started = time.process_time()
        job.look(second, StepCost(0.01, 0.001, 0.001))
        seconds.append(time.process_time() - started)
    assert job.time_left is not None
    assert min(seconds) < 0.05
    mean = sum(usual(rng) for _ in range(10_000)) / 10_000
    assert job.num_tokens_left == pytest.approx(181_000 * num_sequences * mean, rel=0.15)


def test_a_look_at_many_jobs_ends_soon_and_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counter[JobPace]()

    class SlowPace(JobPace):
        def look(self, _now_s: float, _cost: StepCost) -> None:
            looks[self] += 1
            time.sleep(0.6 * client_module.MAX_LOOK_SECONDS)

    monkeypatch.setattr(client_module, "MIN_LOOK_SECONDS", 0.0)
    engine = FakeEngine()
    client, paces = EngineClient(hand_over(engine)), [SlowPace() for _ in range(5)]
    with ExitStack() as stack:
        for number, pace in enumerate(paces):
            stack.enter_context(client.running_job(f"job {number}", pace))
        for num_looks in range(1, 16):
            num_before = looks.total()
            client._look_at_jobs()
            assert 1 <= looks.total() - num_before <= 2
            most, least = max(looks.values()), min(looks[pace] for pace in paces)
            assert most - least <= 1, f"after {num_looks} looks"
    assert client._jobs == {}
