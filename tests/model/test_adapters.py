"""Rows with adapters, in batches with any others, against the models that PEFT merges them into."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoint.helpers.gguf_files import VOCAB
from tests.helpers.peft_adapters import LINEAR, merged_model, save_adapter
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.quantised_models import quantised
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint.adapters import read_adapter
from tokasaurus.model.decoder.adapters import ModelAdapters

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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_each_row_has_the_text_of_its_adapter(tmp_path: Path, family: str, backend: str) -> None:
    oracles = make_oracles(tmp_path, family)
    assert_each_row_has_its_text(tmp_path, [tmp_path / f"adapter{n}" for n in range(1, 7)], oracles, backend)


def test_a_quantised_model_has_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Q4_1, beside PEFT's on the dequantised one, which GGUF's order of channels does not concern."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, base = quantised(tmp_path, "llama", "Q4_1")
    plain, oracles = tmp_path / "plain", [base.eval()]
    sources = [
        save_adapter(plain, tmp_path / str(seed), seed, target_modules=LINEAR, r=rank)
        for seed, rank in ((1, 16), (2, 3))
    ]
    oracles += [merged_model(plain, source) for source in sources]
    assert_each_row_has_its_text(directory, sources, oracles, "cpu", vocab_size=VOCAB)


def assert_each_row_has_its_text(
    directory: Path, sources: list[Path], oracles: list[PreTrainedModel], backend: str, vocab_size: int = VOCAB_SIZE
) -> None:
    """sources: of adapters. oracles: the model without an adapter, and with each."""
    model, info = load(directory, packed=backend == "cpu")
    adapters = ModelAdapters(model, len(sources))
    digests = [""]
    for source in sources:
        adapter = read_adapter(source)
        adapters.load(adapter.digest, adapters.share(adapter))
        digests.append(adapter.digest)
    driver = StepDriver(make_runner(model, info, backend, adapters=adapters))
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
        for slot, logprobs in driver.logprobs_by_slot.items():
            logprobs_of_prompts[slot] += [each.logprob for each in logprobs]
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


def test_decode_steps_in_one_call_have_adapters_too(tmp_path: Path) -> None:
    oracles = make_oracles(tmp_path, "llama")
    model, info = load(tmp_path, packed=True)
    adapters = ModelAdapters(model, 2)
    digests = {}
    for number in (1, 2, 5):
        adapter = read_adapter(tmp_path / f"adapter{number}")
        adapters.load(adapter.digest, adapters.share(adapter))
        digests[number] = adapter.digest
    runner = make_runner(model, info, "cpu", adapters=adapters)
    assert runner.decodes_in_one_call
    driver = StepDriver(runner, want_logprobs=False)
    prompts = {slot: [slot * 7 + i for i in range(5)] for slot in (1, 2, 3)}

    def decode(numbers: dict[int, int]) -> dict[int, list[int]]:
        for slot, number in numbers.items():
            driver.open(slot, prompts[slot], adapter=number)
        texts = {slot: [driver.run([], [(slot, 5)])[slot][0]] for slot in numbers}
        for _ in range(10):
            for slot, (token, _) in driver.run([*numbers], []).items():
                texts[slot].append(token)
        for slot in numbers:
            driver.close(slot)
        return texts

    def expected(oracle: PreTrainedModel, slot: int) -> list[int]:
        return oracle_greedy(oracle, prompts[slot], 11)[0]

    driver.place_adapter(1, digests[1])
    driver.place_adapter(2, digests[2])
    texts = decode({1: 0, 2: 1, 3: 2})
    assert texts == {1: expected(oracles[0], 1), 2: expected(oracles[1], 2), 3: expected(oracles[2], 3)}
    driver.place_adapter(2, digests[5])  # which changes embeddings
    texts = decode({1: 1, 2: 0, 3: 2})
    assert texts == {1: expected(oracles[1], 1), 2: expected(oracles[0], 2), 3: expected(oracles[5], 3)}
    adapters.unload(digests[5])
    adapters.unload(digests[1])
    assert decode({1: 0, 2: 1})[2] == expected(oracles[0], 2)  # nothing is left of it
