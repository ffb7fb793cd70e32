"""Decode steps that the kernels compute in one call, against the same steps taken apart: rows with logprobs take the
usual way, and logprobs do not change what is drawn."""

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, option_config, save_random_model, save_tiny_model
from tests.model.helpers.steps import NOTHING, StepDriver, int32, load_runner
from tokasaurus.messages.forward import ForwardInput, LogitRules, SlotChanges, TokenMasks
from tokasaurus.model.cpu.bindings import DecodeStepStruct, Kernels, PagedForwardStruct, load_kernels
from tokasaurus.model.worker.warmup import steps_of_all_classes

NUM_SLOTS = 6
PAGE_SIZE = 16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the steps that the kernels computed in one call. Each row's block table reaches its position:
    the kernels do not check it."""
    if load_kernels() is None:
        pytest.skip("no kernels for this machine")
    found: list[int] = []
    original = Kernels.decode_step

    def decode_step(kernels: Kernels, step: DecodeStepStruct) -> None:
        found.append(step.num_rows)
        slots = (ctypes.c_int32 * step.num_rows).from_address(step.slots)
        positions = (ctypes.c_int32 * (max(slots) + 1)).from_address(step.positions)
        table_tokens = PagedForwardStruct.from_address(step.forward).parts[0].table_stride * PAGE_SIZE
        assert max(positions[slot] for slot in slots) < table_tokens
        original(kernels, step)

    monkeypatch.setattr(Kernels, "decode_step", decode_step)
    return found


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


OF_FAMILIES = [
    ("gemma3_text", 0),
    ("gemma2", 1),
    ("olmo2", 0),
    ("granite", 0),
    ("smollm3", 0),
    ("phi", 0),
    ("cohere", 1),
]
"""Two rotary tables, or layers without; scaled embeddings, scaled or capped logits, LayerNorms, biases of logits."""


@pytest.mark.parametrize(("family", "number"), OF_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_families_equal_those_of_the_usual_way(
    family: str, number: int, dtype: torch.dtype, tmp_path: Path, calls: list[int]
) -> None:
    save_random_model(tmp_path, option_config(family, number, tied=number == 0 and family != "phi"))
    drivers = [StepDriver(load_runner(tmp_path, dtype), want_logprobs=wanted) for wanted in (False, True)]
    rng = random.Random(family)
    for slot in range(1, 5):
        prompt, params = prompt_of(rng, rng.randrange(1, 40)), {"temperature": slot % 2, "seed": slot}
        for driver in drivers:
            driver.open(slot, prompt, **params)
            driver.run([], [(slot, len(prompt))])
    for _ in range(20):
        found, expected = (driver.run([1, 2, 3, 4], []) for driver in drivers)
        assert [token for token, _ in found.values()] == [token for token, _ in expected.values()]
    assert calls == [4] * 20


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_equal_those_of_the_usual_way(
    family: str, tied: bool, dtype: torch.dtype, tmp_path: Path, calls: list[int]
) -> None:
    """Sequences begin and end at different steps, slots are opened again at once or later, prompts come in chunks
    beside decode rows, rows change their order and leave for some steps, and pages end at different steps."""
    save_tiny_model(tmp_path, family, tied)
    at_once = StepDriver(load_runner(tmp_path, dtype), want_logprobs=False)
    apart = StepDriver(load_runner(tmp_path, dtype), want_logprobs=True)
    drivers = at_once, apart
    rng = random.Random(f"{family} {dtype}")
    decoding: list[int] = []
    waiting = list(range(1, NUM_SLOTS + 1))
    prefilling: int | None = None
    num_decode_steps = num_opened = 0
    for _ in range(180):
        if len(decoding) > 2 and rng.random() < 0.1:
            waiting.append(decoding.pop(rng.randrange(len(decoding))))
            for driver in drivers:
                driver.close(waiting[-1])
        if prefilling is None and waiting and rng.random() < 0.2:
            prefilling = waiting.pop()
            num_opened += 1
            prompt = prompt_of(rng, rng.randrange(1, 40))
            params = {
                "temperature": rng.choice([0.0, 0.7, 1.3]),
                "seed": rng.randrange(1000),
                "sample": rng.randrange(3),
            }
            limits = rng.choice([{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
            for driver in drivers:
                driver.open(prefilling, prompt, **params, **limits)
        rows = rng.sample(decoding, len(decoding)) if rng.random() < 0.3 else decoding
        rows = rows[: rng.randrange(1, len(rows) + 1)] if rows and rng.random() < 0.2 else rows
        chunks = []
        if prefilling is not None:
            chunks = [(prefilling, rng.randrange(1, at_once.remaining(prefilling) + 1))]
        elif not rows:
            continue
        num_before = len(calls)
        found, expected = (driver.run(rows, chunks) for driver in drivers)
        assert {slot: token for slot, (token, _) in found.items()} == {s: token for s, (token, _) in expected.items()}
        is_decode = not chunks
        num_decode_steps += is_decode
        assert calls[num_before:] == ([len(rows)] if is_decode else [])
        if prefilling is not None and not at_once.remaining(prefilling):
            decoding.append(prefilling)
            prefilling = None
    assert num_decode_steps > 60
    assert num_opened > NUM_SLOTS


@pytest.mark.parametrize("what", ["rules", "biases", "masks", "groups"])
def test_other_steps_take_the_usual_way(what: str, tmp_path: Path, calls: list[int]) -> None:
    save_tiny_model(tmp_path, "llama")
    driver = StepDriver(load_runner(tmp_path, torch.float32), want_logprobs=False)
    rng = random.Random(1)
    prompt = prompt_of(rng, 40)
    rules = None
    params = {}
    if what == "rules":
        params = {"presence_penalty": 0.5}
    if what in ("rules", "biases"):
        biases = int(what == "biases")
        arrays = int32([1]), int32([40]), int32([biases]), int32([3] * biases)
        rules = LogitRules(*arrays, np.full(biases, 2.0, np.float32), int32([42] * biases))
    driver.open(1, prompt, rules=rules, **params)
    driver.run([], [(1, 40)])
    driver.open(2, prompt, shares=(1, 2))
    driver.run([], [(2, 8)])
    masks = None
    if what == "masks":
        masks = TokenMasks(int32([0]), np.full((1, -(-VOCAB_SIZE // 32)), 0xFFFFFFFF, np.uint32))
    for _ in range(4):
        driver.run([1, 2], [], groups=[(2, 2)] if what == "groups" else None, masks=masks)
    assert calls == []
    driver.run([2], [])
    assert calls == [1]


def test_a_row_that_is_not_finite_is_told_and_others_go_on(tmp_path: Path, calls: list[int]) -> None:
    """A token whose embedding is NaN, at position 20 of the first of two slots."""
    save_tiny_model(tmp_path, "llama")
    bad = 7
    outputs = []
    for want_logprobs in (False, True):
        runner = load_runner(tmp_path, torch.float32)
        driver = StepDriver(runner, want_logprobs=want_logprobs)
        for slot in (1, 2):
            driver.open(slot, prompt_of(random.Random(slot), 20))
        driver.run([], [(1, 20), (2, 20)])
        runner._model.embedding.weight.data[bad] = torch.nan
        runner._slots.last_tokens[1] = bad
        runner._slots.last_tokens[2] = bad + 1
        step = ForwardInput(9, int32([1, 2]), int32([1, 1]), 2, NOTHING, SlotChanges(NOTHING, None, NOTHING, NOTHING))
        result = runner.run(step)
        outputs.append(result.output())
        assert runner._slots.last_tokens[1] == 0
        assert runner._slots.positions[[1, 2]].tolist() == [21, 21]
    assert calls == [2]
    at_once, apart = outputs
    assert at_once.nonfinite.positions.tolist() == apart.nonfinite.positions.tolist() == [20]
    assert at_once.nonfinite.blocks.tolist() == apart.nonfinite.blocks.tolist()
    assert at_once.token_ids.tolist() == apart.token_ids.tolist()
    assert at_once.token_ids[0] == 0


def test_steps_of_the_warm_up_have_tables_though_their_slots_own_no_block(tmp_path: Path, calls: list[int]) -> None:
    save_tiny_model(tmp_path, "llama")
    at_once, apart = (load_runner(tmp_path, torch.float32) for _ in range(2))
    apart._kernel_decode = None
    for step in steps_of_all_classes(64, 8, 512, PAGE_SIZE):
        found, expected = (runner.run(step).output() for runner in (at_once, apart))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert calls == [1, 2, 3]
