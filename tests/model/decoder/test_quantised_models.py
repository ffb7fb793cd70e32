"""Models of GGUF files whose weights stay quantised, against transformers with the dequantised weights, in float32."""

from pathlib import Path

import pytest

from tests.checkpoint.helpers.gguf_files import VOCAB
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load
from tests.model.helpers.quantised_models import quantised
from tokasaurus.checkpoint import weight_files
from tokasaurus.model.decoder.weights import load_weights


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", "Q4_0", False),
        ("llama", "Q4_1", True),
        ("qwen2", "Q5_0", False),
        ("qwen2", "Q5_1", True),
        ("qwen3", "Q8_0", False),
        ("qwen3", "MXFP4", False),
    ],
)
def test_a_quantised_model_gives_the_tokens_of_the_dequantised_one(
    family: str, kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, oracle = quantised(tmp_path, family, kind, tied)
    model, _ = load(directory, packed=True)
    assert model.block_types == [kind]
    assert model.saved_bytes > 0
    assert all(linear.packed is not None and linear.packed.has_blocks for linear in model._linears())
    assert_equals_oracle(directory, oracle, "cpu", seed=3, vocab_size=VOCAB)


def test_without_the_kernels_a_quantised_model_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, oracle = quantised(tmp_path, "llama", "Q4_1")
    model, _ = load(directory)
    assert model.block_types == []
    assert load_weights(weight_files(directory), model.weight_shards(), model.ignores) == {"Q4_1": 2 * 7 + 2}
    assert_equals_oracle(directory, oracle, "torch", seed=3, vocab_size=VOCAB)
