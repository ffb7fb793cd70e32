"""Decode steps of 80 sequences with FlashInfer inside the recording, beside eager steps with plain torch attention.

Not yet run on a GPU; its logic runs on the CPU over doubles of FlashInfer and of CUDA graphs.
"""

import random
from pathlib import Path

import torch
from transformers import LlamaConfig

from tests.helpers.tiny_model import VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint import fit_to_tensors, read_model_info, weight_files
from tokasaurus.model.buffer_sizes import graph_sizes
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.graphs import Recorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import DeviceSlots
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.staging.staging import Transfers

NUM_SEQUENCES, GRAPH_STEP, NUM_BLOCKS = 80, 24, 1000
NUM_KV_HEADS, HEAD_DIM = 2, 64
ROW_COUNTS = (80, 80, 79, 66, 72, 65, 24, 48, 1, 80)
"""Of the decode steps: recorded sizes (80, 72, 48, 24), and numbers that are padded to them."""

TOLERANCE = 0.15
"""Of log-probabilities: bfloat16 keeps 8 bits of hidden states and of what attention returns. Over the CPU doubles,
they differ by at most 0.04."""


def save_model_with_group(directory: Path, group: int) -> None:
    """A small model with `group` query heads for each KV head."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16 * group,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=group * NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
    )
    save_random_model(directory, config)


def save_model_with_windows(directory: Path) -> None:
    """A small Granite: a layer with a window and one without, with sinks and a scale of their own. The multipliers keep
    roundings small beside what a wrong window, or no sinks, would change."""
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_hidden_layers": 2, "sliding_window": 40, "logits_scaling": 4.0}
    multipliers = {"attention_multiplier": 0.03, "residual_multiplier": 0.3}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    save_random_model(directory, option_config("granite_swa", 0, **sizes, **multipliers, **layers))


def bfloat16_runner(
    directory: Path, backend: str, device: torch.device, transfers: Transfers | None = None
) -> ModelRunner:
    files = weight_files(directory)
    info = fit_to_tensors(read_model_info(directory), files)
    model = build_decoder(info, Mesh(), torch.bfloat16)
    model.materialize(device, info.context_length)
    load_weights(files, model.weight_shards(), model.ignores, lambda _: None)
    sizes = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SEQUENCES, "max_graph_rows": NUM_SEQUENCES}
    runner = make_runner(model, info, backend, **sizes, device=device, dtype=torch.bfloat16, transfers=transfers)
    if transfers is not None:  # a CPU in place of a device: block lists are built there too
        runner._slots.on_device = DeviceSlots(*runner._slots.block_tables.shape, device)
    return runner


def check_recorded_steps(
    directory: Path, recorder: Recorder, device: torch.device, transfers: Transfers | None = None
) -> float:
    """-> the largest difference of a log-probability. directory: the model's. transfers: None for those of the device.

    The eager steps are given the tokens of the recorded ones, so that both see the same contexts. Where two tokens
    are almost equally likely, the runners may choose different ones; the two log-probabilities are still close."""
    recorded = bfloat16_runner(directory, "flashinfer", device, transfers)
    eager = bfloat16_runner(directory, "torch", device)
    recorded.record_graphs(recorder, graph_sizes(NUM_SEQUENCES, GRAPH_STEP), chunk_sizes=[1024])
    drivers = [StepDriver(runner, num_blocks=NUM_BLOCKS) for runner in (recorded, eager)]
    rng = random.Random(0)
    lengths = [rng.randint(1, 150) for _ in range(NUM_SEQUENCES)]
    prompts = {slot: [rng.randrange(VOCAB_SIZE) for _ in range(n)] for slot, n in enumerate(lengths, start=1)}
    slots = list(prompts)
    for driver in drivers:
        for slot, prompt in prompts.items():
            driver.open(slot, prompt)
    chunks = [(slot, len(prompt)) for slot, prompt in prompts.items()]
    prefills = [chunks[first : first + 16] for first in range(0, len(chunks), 16)]
    decodes = [rng.sample(slots, count) for count in ROW_COUNTS]
    steps = [*(([], prefill) for prefill in prefills), *((decode, []) for decode in decodes)]
    num_alike = num_rows = 0
    largest = 0.0
    for decode, prefill in steps:
        got, expected = (driver.run(decode, prefill) for driver in drivers)
        assert got.keys() == expected.keys()
        for slot, (token, logprob) in got.items():
            difference = abs(logprob - expected[slot][1])
            assert difference <= TOLERANCE, f"log-probability of slot {slot}: {logprob}, expected {expected[slot][1]}"
            largest = max(largest, difference)
            num_alike += token == expected[slot][0]
        num_rows += len(got)
        with torch.inference_mode():
            eager._slots.last_tokens.copy_(recorded._slots.last_tokens)
    assert num_alike > 0.9 * num_rows
    return largest
