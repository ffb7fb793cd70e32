"""Decode steps of every size that graphs are recorded for, of sizes between them, and of larger ones."""

import random

import pytest

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.helpers.steps import Runner, StepDriver

NUM_BLOCKS, NUM_SLOTS, MAX_ROWS, STEP = 300, 40, 11, 4
"""The last two: the largest graph, and the difference between two."""

Sampled = dict[int, tuple[int, float | None]]
"""(token, logprob) by slot."""


def decode_every_number_of_rows(runner: Runner) -> list[Sampled]:
    """Up to MAX_ROWS + 2 rows, fewer at a time, then more again, with prompts between; greedy and sampled."""
    rng = random.Random(0)
    driver = StepDriver(runner, num_blocks=NUM_BLOCKS)
    slots = list(range(1, MAX_ROWS + 3))
    results = []
    for slot in slots:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        driver.open(slot, prompt, temperature=float(slot % 2), seed=slot)
        results.append(driver.run(slots[: slot - 1], [(slot, len(prompt))]))
        results += [driver.run(rng.sample(slots[:slot], slot), []) for _ in range(2)]
    counts = (*range(len(slots), 0, -1), *range(1, MAX_ROWS))
    return results + [driver.run(rng.sample(slots, count), []) for count in counts]


def assert_same(got: list[Sampled], want: list[Sampled]) -> None:
    for step, expected in zip(got, want, strict=True):
        assert step.keys() == expected.keys()
        for slot, (token, logprob) in step.items():
            assert token == expected[slot][0]
            assert logprob == pytest.approx(expected[slot][1], abs=1e-4)
