"""A checkpoint that does not fit the model raises an error that names the tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tokasaurus.checkpoint import CheckpointError, read_model_info, weight_files
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None, r"lacks tensor model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.7.mlp.up_proj.weight", torch.zeros(96, 64), r"model.layers.7.mlp.up_proj.weight.*no place"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), r"model.layers.0.self_attn.q_proj.bias.*no place"),
        ("model.norm.weight", torch.zeros(65), r"model.norm.weight has shape \(65,\).*\(64,\)"),
        ("lm_head.weight", None, r"lacks tensor lm_head.weight, which only tie_word_embeddings replaces"),
        ("lm_head.weight", torch.zeros(270, 64), r"lm_head.weight has shape \(270, 64\).*\(272, 64\)"),
        ("model.embed_tokens.weight", torch.zeros(300, 64), r"embed_tokens.weight has shape \(300, 64\).*\(272, 64\)"),
        ("model.layers.3.input_layernorm.weight", torch.zeros(64), r"layers.3.input_layernorm.weight.*no place"),
        ("model.layers.0.self_attn.q_norm.weight", torch.zeros(16), r"layers.0.self_attn.q_norm.weight.*no place"),
        ("model.layers.0.self_attn.o_proj.bias", torch.zeros(64), r"layers.0.self_attn.o_proj.bias.*no place"),
        ("model.layers.0.mlp.up_proj.bias", torch.zeros(96), r"layers.0.mlp.up_proj.bias.*no place"),
        ("model.layers.0.self_attn.rotary_emb.weight", torch.zeros(8), r"rotary_emb.weight.*no place"),
        ("model.layers.0.attn.bias", torch.ones(1, 1, 8, 8), r"layers.0.attn.bias.*no place"),
        ("model.norm.bias", torch.zeros(64), r"model.norm.bias.*no place"),
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(128, 64), r"q_proj.weight has shape \(128, 64\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama")
    rewrite(tmp_path, {name: tensor})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_old_checkpoints_are_passed_over_with_one_line(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, family)
    expected = load(tmp_path)[0].state_dict()
    assert not caplog.messages
    of_rotary = ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
    names = [f"model.layers.{layer}.self_attn.rotary_emb.{name}" for layer in range(3) for name in of_rotary]
    names += ["model.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias", "model.layers.1.self_attn.masked_bias"]
    rewrite(tmp_path, {name: torch.zeros(1, 1, 4, 8) for name in names})
    found = load(tmp_path)[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (line,) = caplog.messages
    assert line.startswith("buffers of an old checkpoint are passed over: 15, such as model.")


def test_nothing_is_read_before_every_tensor_has_been_checked(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", max_shard_size="300KB")
    files = weight_files(tmp_path)
    assert len(files) > 1
    save_file({**load_file(files[-1]), "extra": torch.zeros(3)}, files[-1])
    model = build_decoder(read_model_info(tmp_path), Mesh(), torch.float32)
    model.materialize(torch.device("cpu"), 512)
    read: list[int] = []
    with pytest.raises(CheckpointError, match="extra, which this model has no place for"):
        load_weights(files, model.weight_shards(), model.ignores, read.append)
    assert not read


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a readable safetensors file"):
        load(tmp_path)


def test_two_ranks_together_load_each_byte_of_split_weights_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", max_shard_size="300KB")
    files = weight_files(tmp_path)
    assert len(files) == 2
    stored = {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}
    replicated = sum(size for name, size in stored.items() if name.endswith("norm.weight"))
    num_bytes = 0

    def count(size: int) -> None:
        nonlocal num_bytes
        num_bytes += size

    for rank in range(2):
        model = build_decoder(read_model_info(tmp_path), Mesh(tp_rank=rank, tp_size=2), torch.float32)
        model.materialize(torch.device("cpu"), 512)
        load_weights(files, model.weight_shards(), model.ignores, count)
    assert num_bytes == sum(stored.values()) + replicated
