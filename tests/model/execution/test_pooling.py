"""Vectors and scores equal those of sentence-transformers and transformers, in packed steps and in chunks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.pooling_models import (
    TEXTS,
    head_outputs,
    save_classifier,
    save_embedding_model,
    save_reward_model,
    vectors_of,
)
from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo, fit_to_tensors, read_model_info, weight_files
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.runner import StepResult
from tokasaurus.model.parallel.mesh import Mesh


class Recorded:
    """A runner that keeps each step's output."""

    def __init__(self, directory: Path, info: ModelInfo, by_kernels: bool) -> None:
        model = build_decoder(info, Mesh(), torch.float32)
        model.materialize(CPU, info.context_length)
        load_weights(weight_files(directory), model.weight_shards(), model.ignores)
        model.pack(load_kernels() if by_kernels else None)
        self.runner = make_runner(model, info, None if by_kernels else "torch", num_blocks=400)
        self.output: ForwardOutput | None = None

    def run(self, step: object) -> StepResult | None:
        result = self.runner.run(step)
        self.output = result.output()
        return result


def pooled(directory: Path, task: str | None, chunk: int, by_kernels: bool = True, **changes: object) -> np.ndarray:
    """The result of each of TEXTS: all prompts begin in one step, and each step has `chunk` tokens of each."""
    info = fit_to_tensors(read_model_info(directory, task=task), weight_files(directory))
    info = replace(info, pooling=replace(info.pooling, **changes))
    recorded = Recorded(directory, info, by_kernels)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    driver, found = StepDriver(recorded, num_blocks=400), {}
    prompts = {slot: tokenizer.encode(text) for slot, text in enumerate(TEXTS, start=1)}
    for slot, prompt in prompts.items():
        driver.open(slot, prompt)
    while open_slots := [slot for slot in prompts if slot not in found]:
        sampled = driver.run([], [(slot, min(chunk, driver.remaining(slot))) for slot in open_slots])
        assert recorded.output.nonfinite is None
        found |= dict(zip(sampled, recorded.output.vectors, strict=True))
    return np.stack([found[slot] for slot in prompts])


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    assert found.dtype == np.float32
    return bool(np.abs(found - expected).max() < 1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(("family", "pooling"), [("qwen3", "lasttoken"), ("llama", "mean"), ("mistral", "cls")])
def test_vectors_equal_those_of_sentence_transformers(
    tmp_path: Path, family: str, pooling: str, by_kernels: bool
) -> None:
    encoder = save_embedding_model(tmp_path / "model", family, pooling, normalizes=False)
    expected = vectors_of(encoder, TEXTS)
    for chunk in (7, 1000):
        assert close(pooled(tmp_path / "model", None, chunk, by_kernels), expected)


@pytest.mark.parametrize(("num_labels", "by_token"), [(3, False), (1, False), (1, True)])
def test_scores_equal_those_of_transformers(tmp_path: Path, num_labels: int, by_token: bool) -> None:
    model = save_classifier(tmp_path, "llama", num_labels, by_token)
    assert close(pooled(tmp_path, None, 13), head_outputs(model, tmp_path, TEXTS))


def test_a_head_of_two_layers_has_biases_and_a_relu(tmp_path: Path) -> None:
    model = save_reward_model(tmp_path)
    assert close(pooled(tmp_path, None, 13), head_outputs(model, tmp_path, TEXTS))


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_gives_hidden_states_and_the_logits_of_two_answers(tmp_path: Path, tied: bool) -> None:
    model = save_tiny_model(tmp_path, "qwen3", tied)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        outputs = [model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True) for text in TEXTS]
    assert close(pooled(tmp_path, "embed", 9), torch.stack([each.hidden_states[-1][0, -1] for each in outputs]).numpy())
    logits = torch.stack([each.logits[0, -1, [5, 77]] for each in outputs]).numpy()
    assert close(pooled(tmp_path, "score", 9, answers=(5, 77)), logits)


def test_a_mean_without_its_first_tokens_is_no_number(tmp_path: Path) -> None:
    """A cached prefix has no hidden states."""
    save_embedding_model(tmp_path / "model", "llama", "mean", normalizes=False)
    info = fit_to_tensors(read_model_info(tmp_path / "model"), weight_files(tmp_path / "model"))
    recorded = Recorded(tmp_path / "model", info, by_kernels=True)
    driver = StepDriver(recorded, num_blocks=400)
    driver.open(1, list(range(40)))
    driver.run([], [(1, 40)])
    assert np.isfinite(recorded.output.vectors).all()
    driver.open(2, list(range(40)), shares=(1, 1))
    driver.run([], [(2, 24)])
    assert np.isnan(recorded.output.vectors).all()
    assert recorded.output.nonfinite is not None
