"""Greedy decoding of a saved model: by our runner in mixed batches, and by transformers token by token."""

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo, fit_to_tensors, read_model_info, weight_files
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.registry import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh


def load(
    directory: Path, mesh: Mesh | None = None, device: torch.device = CPU, packed: bool = False
) -> tuple[Decoder, ModelInfo]:
    """packed: pack weights for the kernels, as the server does; otherwise torch computes all but attention."""
    files = weight_files(directory)
    model_info = fit_to_tensors(read_model_info(directory), files)
    model = build_decoder(model_info, mesh or Mesh(), torch.float32)
    model.materialize(device, model_info.context_length)
    load_weights(files, model.weight_shards(), model.ignores, lambda _: None)
    if packed:
        model.pack(load_kernels())
    return model, model_info


def oracle_greedy(oracle: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """-> tokens and their logprobs, each from a forward of all tokens before it."""
    ids = list(prompt)
    logprobs = []
    for _ in range(num_tokens):
        with torch.no_grad():
            next_logprobs = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
        ids.append(int(next_logprobs.argmax()))
        logprobs.append(float(next_logprobs.max()))
    return ids[len(prompt) :], logprobs


def greedy_in_a_mixed_batch(
    driver: StepDriver, prompts: list[list[int]], num_tokens: int, rng: random.Random
) -> tuple[list[list[int]], list[list[float]]]:
    """-> tokens and logprobs by prompt. Prompts are prefilled in chunks of random sizes while others decode."""
    slots = list(range(1, len(prompts) + 1))
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    logprobs: dict[int, list[float]] = {slot: [] for slot in slots}
    for slot, prompt in zip(slots, prompts, strict=True):
        driver.open(slot, prompt)
    while any(len(tokens[slot]) < num_tokens for slot in slots):
        decode = [slot for slot in slots if not driver.remaining(slot) and len(tokens[slot]) < num_tokens]
        prefilling = [slot for slot in slots if driver.remaining(slot)]
        chosen = rng.sample(prefilling, rng.randint(0 if decode else 1, len(prefilling))) if prefilling else []
        prefill = [(slot, min(driver.remaining(slot), rng.randint(1, 25))) for slot in chosen]
        for slot, (token, logprob) in driver.run(decode, prefill).items():
            tokens[slot].append(token)
            logprobs[slot].append(logprob)
    return list(tokens.values()), list(logprobs.values())


def assert_equals_oracle(
    directory: Path, oracle: PreTrainedModel, backend: str, seed: int, device: torch.device = CPU
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 90]))] for _ in range(6)]
    model, model_info = load(directory, device=device, packed=backend == "cpu")
    driver = StepDriver(make_runner(model, model_info, backend, device=device), seed=seed)
    tokens, logprobs = greedy_in_a_mixed_batch(driver, prompts, 20, rng)
    for prompt, got_tokens, got_logprobs in zip(prompts, tokens, logprobs, strict=True):
        expected_tokens, expected_logprobs = oracle_greedy(oracle, prompt, 20)
        assert got_tokens == expected_tokens
        assert got_logprobs == pytest.approx(expected_logprobs, abs=1e-4)
