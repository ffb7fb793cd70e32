"""A model written to GGUF is the model, tensor for tensor; its weights stay in the file."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, Keys, dequantize, quantize
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.checkpoint.helpers.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYER_NAMES,
    LAYERS,
    VOCAB,
    random_weights,
    write_gguf,
)
from tests.helpers.damage import DAMAGE
from tokasaurus.checkpoint import CheckpointError, read_model_info, resolve_checkpoint, with_safetensors
from tokasaurus.checkpoint.rope import RopeInfo
from tokasaurus.messages.sampling import SamplingParams

Kind = GGMLQuantizationType


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F32, Kind.F16, Kind.BF16])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_restored_under_its_name_in_its_order(
    tmp_path: Path, family: str, kind: Kind, tied: bool
) -> None:
    weights = random_weights(family, tied)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, family, weights, kind)
    checkpoint = resolve_checkpoint(str(path))
    found = load_file(with_safetensors(checkpoint.directory) / "model.safetensors")
    assert found.keys() == weights.keys()
    kept = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    for name, array in weights.items():
        # Quantisation works along a row, so the rows' order in the file does not matter to it.
        expected = array if array.ndim == 1 else dequantize(quantize(array, kind), kind)
        assert found[name].dtype == (torch.float32 if array.ndim == 1 else kept)
        np.testing.assert_array_equal(found[name].float().numpy(), expected, err_msg=name)
    assert checkpoint.name == "tiny"
    assert checkpoint.info == read_model_info(checkpoint.directory)
    assert checkpoint.info.family == family
    assert checkpoint.info.tie_embeddings is tied
    assert checkpoint.info.dtype == str(kept).removeprefix("torch.")
    assert (checkpoint.info.num_layers, checkpoint.info.vocab_size) == (LAYERS, VOCAB)
    assert checkpoint.info.head_dim == HEAD_DIM
    assert checkpoint.info.spec.final_norm.eps == 1e-5
    assert checkpoint.info.spec.rotary[0] == RopeInfo(500000.0)


def test_sampling_settings_of_the_metadata_are_defaults_as_those_of_generation_config_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the keys that the gguf library declares; the others are named."""
    keys = {name: key for name, key in vars(Keys.General).items() if name.startswith("SAMPLING_")}
    values = {"TEMP": 0.6, "TOP_P": 0.95, "TOP_K": 20, "MIN_P": 0.05, "PENALTY_REPEAT": 1.05, "XTC_PROBABILITY": 0.5}
    others = {"SEQUENCE", "XTC_THRESHOLD", "PENALTY_LAST_N", "MIROSTAT", "MIROSTAT_TAU", "MIROSTAT_ETA"}
    assert {f"SAMPLING_{name}" for name in (*values, *others)} == set(keys)
    path = tmp_path / "tiny.gguf"
    fields = {keys[f"SAMPLING_{name}"]: value for name, value in values.items()}
    write_gguf(path, "llama", random_weights("llama", True), Kind.F16, fields)
    found = resolve_checkpoint(str(path), applies_sampling=True)
    assert found.default_sampling == SamplingParams(0.6, 0.95, 20, 0.05, repetition_penalty=1.05)
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json: general.sampling.xtc_probability=0.5: left to each request"
    ]
    assert resolve_checkpoint(str(path)).default_sampling == SamplingParams()


def test_a_file_with_an_adapter_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), Kind.F16, {"general.type": "adapter"})
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: it is an adapter, not a model"):
        resolve_checkpoint(str(path))


@pytest.mark.parametrize(("factor", "high"), [(32.0, 4.0), (16.0, 1.0)])
def test_llama3_scaling_is_derived_from_the_rope_factors(factor: float, high: float, tmp_path: Path) -> None:
    """Of Llama 3.2, and of Llama 4."""
    fields = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    fields["original_max_position_embeddings"] = 8192
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **fields}
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), Kind.F32, rope_factors=(plain / scaled).numpy())
    checkpoint = resolve_checkpoint(str(path))
    found = dataclasses.asdict(checkpoint.info.spec.rotary[0])
    assert found.pop("factor") == pytest.approx(factor)
    assert RopeInfo(factor=factor, **found) == RopeInfo(500000.0, "llama3", factor, 1.0, high, 8192)
    assert "rope_freqs.weight" not in load_file(with_safetensors(checkpoint.directory) / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"type": "none"}, RopeInfo(500000.0)),
        ({"type": "linear", "factor": 2.5}, RopeInfo(500000.0, "linear", 2.5)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True},
            # 0.1 ln 4 + 1
            RopeInfo(500000.0, "yarn", 4.0, original_context_length=64, attention_factor=1.1386294361119891),
        ),
        (
            {
                **{"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_attn_factor": 1.5},
                **{"yarn_ext_factor": 1.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            },
            RopeInfo(
                500000.0, "yarn", 4.0, original_context_length=64, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
            ),
        ),
        (
            {
                **{"type": "yarn", "factor": 4.0, "original_context_length": 64},
                **{"yarn_log_multiplier": 1.0, "attn_factor": 0.5},
            },
            RopeInfo(500000.0, "yarn", 4.0, original_context_length=64, attention_factor=0.5),
        ),
    ],
)
def test_rotary_scaling_of_the_metadata_is_kept(tmp_path: Path, fields: dict[str, object], expected: RopeInfo) -> None:
    path = tmp_path / "scaled.gguf"
    named = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    write_gguf(path, "llama", random_weights("llama", tied=True), Kind.F32, named)
    assert resolve_checkpoint(str(path)).info.spec.rotary[0] == expected


def test_rope_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(path, "llama", random_weights("llama", True), Kind.F32, rope_factors=factors)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*not the Llama 3 scaling"):
        resolve_checkpoint(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor"),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast = 16.0 is not supported with 'none'"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ({"llama.attention.temperature_scale": 0.1}, "temperature_scale = 0.1"),
        ({"llama.attention.sliding_window": 128}, "sliding_window = 128"),
        ({"llama.expert_weights_scale": 2.0}, "expert_weights_scale = 2.0"),
        ({"llama.some_new_scale": 2.0}, "some_new_scale"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs by layer"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.attention.head_count": None}, "head_count"),
        ({"split.count": 3}, "split.no is 0 and split.count 3"),
        ({"tokenizer.ggml.pre": "default"}, "pre-tokenizer 'default'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5'"),
        ({"tokenizer.ggml.model": "llama"}, "tokens have not each a score"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), Kind.F32, fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_checkpoint(str(path))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "converted").glob("[!.]*"))


def test_unknown_tensors_and_architectures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    monkeypatch.setitem(LAYER_NAMES, "self_attn.q_proj.bias", "attn_sinks.weight")
    write_gguf(path, "llama", random_weights("qwen2", True), Kind.F32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight does not belong in a llama model"):
        resolve_checkpoint(str(path))
    write_gguf(path, "mamba", random_weights("llama", True), Kind.F32)
    with pytest.raises(CheckpointError, match="architecture 'mamba'"):
        resolve_checkpoint(str(path))


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "tiny.gguf"
    write_gguf(whole, "llama", random_weights("llama", True), Kind.F32)
    content = whole.read_bytes()
    for size in (0, 10, 200, 3000, len(content) // 2, len(content) - 1000):
        path = tmp_path / f"cut{size}.gguf"
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            resolve_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="there is no file"):
        resolve_checkpoint(str(tmp_path / "absent.gguf"))


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    phases: list[str] = []
    write_gguf(path, "llama", random_weights("llama", True), Kind.F32)
    first = resolve_checkpoint(str(path), on_phase=phases.append)
    second = resolve_checkpoint(str(path), on_phase=phases.append)
    assert first == second
    assert phases == ["reading the header of tiny.gguf (once)"]
    write_gguf(path, "llama", random_weights("llama", False), Kind.F32)
    third = resolve_checkpoint(str(path), on_phase=phases.append)
    assert third.directory != first.directory
    assert not third.info.tie_embeddings


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["gguf.json", "config.json", "tokenizer.json"])
def test_a_damaged_conversion_is_made_again(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), Kind.Q8_0)
    damaged = resolve_checkpoint(str(path)).directory / name
    content = damaged.read_bytes()
    DAMAGE[kind](damaged)
    phases: list[str] = []
    assert resolve_checkpoint(str(path), on_phase=phases.append).directory == damaged.parent
    assert phases == ["reading the header of tiny.gguf (once)"]
    assert damaged.read_bytes() == content
