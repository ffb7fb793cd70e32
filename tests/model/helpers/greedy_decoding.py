"""A saved model: greedy decoding by our runner in mixed batches and by transformers token by token; whole prompts."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo, fit_to_tensors, read_model_info, weight_files
from tokasaurus.checkpoint.spec import attentions_of
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.decoder.state_rows import Segments
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.executors import choose_executor
from tokasaurus.model.parallel.mesh import Mesh


def load(
    directory: Path,
    mesh: Mesh | None = None,
    device: torch.device = CPU,
    packed: bool = False,
    rope_scaling: dict[str, Any] | None = None,
) -> tuple[Decoder, ModelInfo]:
    """packed: pack weights for the kernels, as the server does, quantised ones as blocks; otherwise torch computes all
    but attention, with dequantised weights."""
    files = weight_files(directory)
    model_info = fit_to_tensors(read_model_info(directory, rope_scaling), files)
    model = build_decoder(model_info, mesh or Mesh(), torch.float32)
    model.materialize(device, model_info.context_length)
    quantization = model_info.quantization
    load_weights(files, model.weight_shards(), model.ignores, may_keep_blocks=packed, quantization=quantization)
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
            assert logprob is not None
            tokens[slot].append(token)
            logprobs[slot].append(logprob)
    return list(tokens.values()), list(logprobs.values())


def assert_equals_oracle(
    directory: Path,
    oracle: PreTrainedModel,
    backend: str | None,
    seed: int,
    device: torch.device = CPU,
    vocab_size: int = VOCAB_SIZE,
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 90]))] for _ in range(6)]
    model, model_info = load(directory, device=device, packed=backend in ("cpu", None))
    driver = StepDriver(make_runner(model, model_info, backend, device=device), seed=seed)
    tokens, logprobs = greedy_in_a_mixed_batch(driver, prompts, 20, rng)
    for prompt, got_tokens, got_logprobs in zip(prompts, tokens, logprobs, strict=True):
        expected_tokens, expected_logprobs = oracle_greedy(oracle, prompt, 20)
        assert got_tokens == expected_tokens
        assert got_logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def run_whole_prompt(
    model: Model, model_info: ModelInfo, mesh: Mesh, hidden: torch.Tensor | None, token_ids: torch.Tensor
) -> torch.Tensor:
    """One stage's forward of one prompt, with a KV cache of its own -> its hidden states, or all logits."""
    num_heads = mesh.shard(model_info.num_heads, "")[1]
    num_kv_heads = mesh.kv_head_shard(model_info.num_kv_heads)[1]
    layers = attentions_of(model.spec.layers[index] for index in mesh.stage_layers(model_info))
    sizes = len(layers), num_heads, num_kv_heads, model_info.head_dim, 16
    shape = KVShape(*sizes, torch.float32, CPU, layers=layers, sinks=model.sinks)
    backend = make_backend("reference", shape, None)
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // 16)
    backend.allocate(num_blocks + 1)
    everything = PagedPart(
        first_row=0,
        num_rows=num_tokens,
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32).unsqueeze(0),
        kv_lengths=torch.tensor([num_tokens], dtype=torch.int32),
        causal=True,
    )
    positions = torch.arange(num_tokens)
    if model.states is not None:
        model.states.allocate(2, CPU)
        model.states.segments = Segments.of_prompt(num_tokens, target=1)
    layout = PagedLayout(positions + 16, (everything,))
    backend.plan(layout)
    with torch.inference_mode():
        out: torch.Tensor = model(
            token_ids, hidden, positions, choose_executor(model, backend), attends_over(backend, layout)
        )
        return model.logits(out) if mesh.is_last_stage else out


def run_stages(
    directory: Path, token_ids: torch.Tensor, pp_size: int = 1, rope_scaling: dict[str, Any] | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Runs the stages one after another -> all logits, and the number of layers of each stage."""
    hidden = None
    num_layers = []
    for pp_rank in range(pp_size):
        mesh = Mesh(pp_rank=pp_rank, pp_size=pp_size)
        stage, model_info = load(directory, mesh, packed=True, rope_scaling=rope_scaling)
        num_layers.append(len(stage.layers))
        hidden = run_whole_prompt(stage, model_info, mesh, hidden, token_ids)
    assert hidden is not None
    return hidden, num_layers
