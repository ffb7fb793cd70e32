"""The decoder against transformers, in float32."""

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.model.steps import CPU, StepDriver, make_runner
from tests.tiny_model import VOCAB_SIZE, save_tiny_model
from tokasaurus.checkpoint import ModelInfo, info, read_model_info, weight_files
from tokasaurus.model.architectures import registry
from tokasaurus.model.architectures.decoder import Decoder, DecoderOptions
from tokasaurus.model.architectures.registry import build_decoder
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.weights import load_weights

FAMILIES = ["llama", "qwen2", "qwen3"]


def load(directory: Path, mesh: Mesh | None = None) -> tuple[Decoder, ModelInfo]:
    model_info = read_model_info(directory)
    model = build_decoder(model_info, mesh or Mesh(), torch.float32)
    model.materialize(CPU, model_info.context_length)
    load_weights(weight_files(directory), model.weight_pieces(), model.ignores, lambda _: None)
    return model, model_info


def oracle_greedy(oracle: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Each token from a whole forward of everything before it."""
    ids = list(prompt)
    logprobs = []
    for _ in range(num_tokens):
        with torch.no_grad():
            scores = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return ids[len(prompt) :], logprobs


def greedy_in_a_mixed_batch(
    driver: StepDriver, prompts: list[list[int]], num_tokens: int, rng: random.Random
) -> tuple[list[list[int]], list[list[float]]]:
    """All prompts at once: chunks of random sizes while others decode."""
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


def assert_equals_oracle(directory: Path, oracle: PreTrainedModel, backend: str, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 90]))] for _ in range(6)]
    model, model_info = load(directory)
    driver = StepDriver(make_runner(model, model_info, backend), seed=seed)
    tokens, logprobs = greedy_in_a_mixed_batch(driver, prompts, 20, rng)
    for prompt, got_tokens, got_logprobs in zip(prompts, tokens, logprobs, strict=True):
        expected_tokens, expected_logprobs = oracle_greedy(oracle, prompt, 20)
        assert got_tokens == expected_tokens
        assert got_logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_mixed_batches_give_the_tokens_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, family)
    assert_equals_oracle(tmp_path, oracle, backend, seed=FAMILIES.index(family))


def test_tied_embeddings_serve_as_the_lm_head(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama", tied=True)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=7)


def test_weights_come_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "qwen2", max_shard_size="60KB")
    assert len(weight_files(tmp_path)) > 2
    assert_equals_oracle(tmp_path, oracle, "torch", seed=8)


def test_a_family_is_added_by_two_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/adding_a_model.md says, with Mistral for an example."""
    oracle = save_tiny_model(tmp_path, "mistral")
    monkeypatch.setitem(info.FAMILIES, "mistral", info.FamilyConfig("MistralForCausalLM", ("sliding_window",)))
    monkeypatch.setitem(registry.FAMILIES, "mistral", DecoderOptions())
    assert_equals_oracle(tmp_path, oracle, "torch", seed=9)


def test_pipeline_stages_run_one_after_the_other_equal_the_whole(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    whole, _ = load(tmp_path)
    first, _ = load(tmp_path, Mesh(pp_rank=0, pp_size=2))
    last, _ = load(tmp_path, Mesh(pp_rank=1, pp_size=2))
    assert [len(first.layers), len(last.layers)] == [2, 1]
    assert first.final_norm is None
    assert last.embedding is None
    named = dict(whole.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, named[name])
    for name, parameter in last.layers[0].named_parameters():
        assert torch.equal(parameter, named[f"layers.2.{name}"])


def test_tensor_shards_put_together_equal_the_whole(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    whole, _ = load(tmp_path)
    shards = [load(tmp_path, Mesh(tp_rank=rank, tp_size=2))[0] for rank in range(2)]
    head = torch.cat([shard.lm_head.weight for shard in shards])
    assert torch.equal(head, whole.lm_head.weight)
    for index, layer in enumerate(whole.layers):
        parts = [shard.layers[index] for shard in shards]
        # The fused rows of a shard are its own queries, keys and values: 2 of 4 heads, 1 of 2 KV heads, 16 each.
        for name in ("weight", "bias"):
            pieces = [getattr(part.attention.qkv, name).split([32, 16, 16]) for part in parts]
            rebuilt = torch.cat([piece for triple in zip(*pieces, strict=True) for piece in triple])
            assert torch.equal(rebuilt, getattr(layer.attention.qkv, name))
        out = torch.cat([part.attention.out.weight for part in parts], dim=1)
        assert torch.equal(out, layer.attention.out.weight)
        down = torch.cat([part.mlp.down.weight for part in parts], dim=1)
        assert torch.equal(down, layer.mlp.down.weight)
