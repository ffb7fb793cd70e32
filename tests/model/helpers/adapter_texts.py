"""Rows with adapters, in batches with any others, against the models that PEFT merges them into."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.peft_adapters import LINEAR, merged_model, save_adapter
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint.adapters import read_adapter
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.runner import ModelRunner

ADAPTERS: list[dict[str, Any]] = [
    {"r": 16, "lora_alpha": 16, "target_modules": LINEAR},
    {"r": 3, "use_rslora": True, "target_modules": LINEAR},
    {"target_modules": ["k_proj", "down_proj"], "rank_pattern": {"k_proj": 9}},
    {"target_modules": ["up_proj", "lm_head"]},
    {"target_modules": ["embed_tokens", "o_proj"]},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
]


def make_oracles(directory: Path, family: str) -> list[PreTrainedModel]:
    """The base model, saved in `directory`, and then it with each of ADAPTERS, which are saved beneath."""
    oracles = [save_tiny_model(directory, family)]
    for number, options in enumerate(ADAPTERS, start=1):
        adapter = save_adapter(directory, directory / f"adapter{number}", seed=number, **options)
        oracles.append(merged_model(directory, adapter))
    return oracles


def assert_each_row_has_its_text(
    directory: Path,
    sources: list[Path],
    oracles: list[PreTrainedModel],
    backend: str,
    vocab_size: int = VOCAB_SIZE,
    prepare: Callable[[ModelRunner], None] = lambda _: None,
    compiler: Compiler | None = None,
) -> None:
    """sources: of adapters. oracles: the model without an adapter, and with each. prepare: called with the runner,
    before it runs steps."""
    model, info = load(directory, packed=backend == "cpu")
    if compiler is not None:
        model.begin_packing(None, compiler=compiler)
        model.end_packing()
    adapters = ModelAdapters(model, len(sources), max_rank=16, max_tokens=256)
    digests = [""]
    for source in sources:
        adapter = read_adapter(source)
        adapters.load(adapter.digest, adapters.share(adapter))
        digests.append(adapter.digest)
    runner = make_runner(model, info, backend, compiler=compiler, adapters=adapters)
    prepare(runner)
    driver = StepDriver(runner)
    for number in range(1, len(oracles)):
        driver.place_adapter(number, digests[number])
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 15, 33]))] for _ in oracles]
    slots = dict(enumerate(range(len(oracles)), start=1))
    got: dict[int, list[tuple[int, float | None]]] = {slot: [] for slot in slots}
    for slot, number in slots.items():
        driver.open(slot, prompts[number], adapter=number, num_prompt_top=1)
    logprobs_of_prompts: dict[int, list[float]] = {slot: [] for slot in slots}
    while any(len(tokens) < 12 for tokens in got.values()):
        decode = [slot for slot in slots if not driver.remaining(slot) and len(got[slot]) < 12]
        prefill = [(slot, min(driver.remaining(slot), rng.randint(1, 20))) for slot in slots if driver.remaining(slot)]
        for slot, sampled in driver.run(decode, prefill).items():
            got[slot].append(sampled)
        for slot, of_prompt in driver.logprobs_by_slot.items():
            logprobs_of_prompts[slot] += [each.logprob for each in of_prompt]
    for slot, number in slots.items():
        tokens, logprobs = oracle_greedy(oracles[number], prompts[number], 12)
        assert [token for token, _ in got[slot]] == tokens, number
        assert [logprob for _, logprob in got[slot]] == pytest.approx(logprobs, abs=1e-4)
        with torch.no_grad():
            scores = oracles[number](torch.tensor([prompts[number]])).logits[0].log_softmax(-1)
        expected = [float(scores[i, token]) for i, token in enumerate(prompts[number][1:])]
        assert logprobs_of_prompts[slot] == pytest.approx(expected, abs=1e-4)
    # Their texts differ, so that rows with another's would be seen.
    assert len({tuple(oracle_greedy(oracle, prompts[0], 12)[0]) for oracle in oracles}) == len(oracles)
