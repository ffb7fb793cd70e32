"""Every step of the scheduler has a shape class that the warm-up has run."""

import dataclasses
import random
from pathlib import Path

import pytest

from tests.helpers.tiny_model import save_tiny_model
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner
from tokasaurus.manager.planning import prefix_groups
from tokasaurus.manager.state.engine_state import HydragenOptions
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.model.worker.shape_classes import ShapeClass, shape_class, steps_of_all_classes

NUM_STEPS = 10_000


def warmed_up(directory: Path, max_tokens: int = 8192, max_seqs: int = 64) -> list[ShapeClass]:
    """Runs the steps; the classes of those that are not there to open slots."""
    save_tiny_model(directory, "llama")
    model, info = load(directory)
    runner = make_runner(model, info, "torch")
    classes = []
    for step in steps_of_all_classes(max_tokens, max_seqs, info.context_length, page_size=16):
        assert step.num_tokens.sum() <= max_tokens
        assert len(step.slots) <= max_seqs
        classes.append(shape_class(step, len(runner.run(step).host_token_ids())))
    return classes


def test_ten_thousand_random_steps_of_the_scheduler_have_no_other_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 40 tokens, some shared; 1 to 8 samples; cancelled requests; preemption in a small KV cache;
    trials of prefix groups."""
    monkeypatch.setattr(prefix_groups, "FIRST_INTERVAL", 4)
    known = set(warmed_up(tmp_path))
    found: dict[ShapeClass, int] = {}
    rng = random.Random(0)
    num_steps, number = 0, 0
    while num_steps < NUM_STEPS:
        few_tokens, few_rows = rng.choice([(1, 1), (2, 2), (16, 4), (64, 16)])
        options = make_options(
            rng.choice([40, 200]),
            max_tokens_per_forward=few_tokens,
            max_seqs_per_forward=few_rows,
            hydragen=rng.choice([None, HydragenOptions(1, 1), HydragenOptions(2, 1, is_tried=True)]),
        )
        driver = EngineDriver(options, forecast=rng.choice([None, EndsNext()]), rng=rng)
        unanswered, seen = [], -1
        for _ in range(rng.randint(50, 300)):
            messages = []
            if rng.random() < rng.choice([0.02, 0.2]):
                number += 1
                seed = number if rng.random() < 0.5 else number // 8  # the same seed makes the same prompt
                num_prompt_tokens, num_sequences = rng.choice([1, 2, 3, 12, 40]), rng.choice([1, 1, 2, 8])
                request = make_request(seed, num_prompt_tokens, num_sequences, rng.randint(1, 12))
                messages.append(dataclasses.replace(request, request_id=f"r{number}"))
                unanswered.append(f"r{number}")
            if unanswered and rng.random() < 0.05:
                messages.append(CancelRequest(unanswered.pop(rng.randrange(len(unanswered)))))
            driver.step(messages, rng.randint(0, 2))
            for step, sent in zip(driver.queue, driver.state.steps_in_flight, strict=True):
                if step.step_id > seen:
                    seen = step.step_id
                    shape = shape_class(step, len(sent.sampled))
                    found[shape] = found.get(shape, 0) + 1
                    num_steps += 1
    assert set(found) <= known, set(found) - known
    assert len(found) > 0.8 * len(known), known - set(found)


def test_steps_keep_the_limits_of_a_small_server(tmp_path: Path) -> None:
    assert warmed_up(tmp_path, max_tokens=1, max_seqs=1)
    assert {shape.num_tokens for shape in warmed_up(tmp_path, max_tokens=2, max_seqs=8)} == {1, 2}
