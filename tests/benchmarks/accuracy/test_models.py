"""The models of the accuracy benchmark: equal functions, and the weights that the server makes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFValueType
from numpy.typing import NDArray

from benchmarks.accuracy.models import (
    EMBEDDING,
    Weights,
    read_metadata,
    read_weights,
    round_to_bfloat16,
    round_to_int4,
    round_to_int8,
    shuffle_channels,
    stored_types,
    write_model,
)
from tokasaurus.model.decoder.quantize import quantized

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, VOCAB = 64, 96, 4, 2, 10
HEAD = HIDDEN // NUM_HEADS
NUMBERS = {
    "block_count": 2,
    "embedding_length": HIDDEN,
    "feed_forward_length": INTERMEDIATE,
    "attention.head_count": NUM_HEADS,
    "attention.head_count_kv": NUM_KV_HEADS,
}


class Field(SimpleNamespace):
    """As GGUFReader has them."""

    def contents(self) -> object:
        return self.value


METADATA = {f"llama.{name}": Field(value=number, types=[GGUFValueType.UINT32]) for name, number in NUMBERS.items()}


def random_weights() -> Weights:
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (NUM_KV_HEADS * HEAD, HIDDEN),
        "attn_v": (NUM_KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    named = {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in shapes.items()}
    named |= {EMBEDDING: (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in named.items()}


def forward(weights: Weights, token_ids: list[int]) -> NDArray[np.float64]:
    """Logits [T, vocabulary], without positions: rotary embedding concerns queries and keys alone."""
    wide = {name: values.astype(np.float64) for name, values in weights.items()}

    def norm(hidden: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = hidden / np.sqrt((hidden**2).mean(1, keepdims=True)) * weight
        return scaled

    hidden = wide[EMBEDDING][token_ids]
    for layer in range(2):

        def of(name: str, layer: int = layer) -> NDArray[np.float64]:
            return wide[f"blk.{layer}.{name}.weight"]

        x = norm(hidden, of("attn_norm"))
        heads = []
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            mine, shared = slice(head * HEAD, (head + 1) * HEAD), slice(kv_head * HEAD, (kv_head + 1) * HEAD)
            scores = np.tril(np.exp((x @ of("attn_q")[mine].T) @ (x @ of("attn_k")[shared].T).T / HEAD))
            heads.append(scores / scores.sum(1, keepdims=True) @ (x @ of("attn_v")[shared].T))
        hidden = hidden + np.concatenate(heads, axis=1) @ of("attn_output").T
        x = norm(hidden, of("ffn_norm"))
        gate = x @ of("ffn_gate").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ of("ffn_up").T)) @ of("ffn_down").T
    return norm(hidden, wide["output_norm.weight"]) @ wide[EMBEDDING].T


def test_a_model_with_shuffled_channels_has_the_same_logits() -> None:
    weights = random_weights()
    shuffled = shuffle_channels(weights, METADATA, seed=1)
    assert all((shuffled[name] != weights[name]).any() for name in weights)
    np.testing.assert_allclose(forward(shuffled, [1, 7, 3]), forward(weights, [1, 7, 3]), rtol=1e-9)


def test_a_written_model_has_the_types_asked_for_and_weights_near_the_given_ones(tmp_path: Path) -> None:
    weights = random_weights()
    path = tmp_path / "model.gguf"
    write_model(path, weights, METADATA, "Q5_1")
    assert stored_types(path).keys() == {"Q5_1", "Q8_0"}
    metadata = read_metadata(path)
    assert [metadata[name].contents() for name in METADATA] == list(NUMBERS.values())
    found = read_weights(path)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        steps = 2 * np.abs(values).max() / 31
        assert np.abs(found[name] - values).max() <= steps / 2 * 1.1, name
        assert values.ndim == 2 or (found[name] == values).all(), name


@pytest.mark.parametrize(("made", "round_rows"), [("int8", round_to_int8), ("int4", round_to_int4)])
def test_rounded_weights_are_those_that_the_server_makes(
    made: str, round_rows: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    rows = random_weights()["blk.0.attn_q.weight"]
    expected = quantized(torch.from_numpy(rows), made).dequantized().numpy()
    np.testing.assert_allclose(round_rows(rows), expected, rtol=1e-5, atol=1e-6)


def test_values_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    bits = np.arange(0x3F800000, 0x3F800000 + 0x40000, 7, dtype=np.uint32)
    values = np.concatenate((bits.view(np.float32), -bits.view(np.float32)))
    assert (round_to_bfloat16(values) == torch.from_numpy(values).bfloat16().float().numpy()).all()
