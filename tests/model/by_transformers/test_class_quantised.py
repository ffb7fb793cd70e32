"""Checkpoints with quantised weights, of classes with experts and without: transformers with the weights they mean."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.helpers.gguf_families import write_family_gguf
from tests.checkpoint.helpers.gguf_files import VOCAB, random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import change_quantization
from tests.checkpoint.helpers.quantised_weights import Format, quantise
from tests.model.by_transformers.helpers import next_token
from tests.model.by_transformers.helpers.every_class import load_class
from tests.model.by_transformers.helpers.next_token import assert_next_token
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors

FORMATS = [
    Format("awq", group_size=64),
    Format("gptq"),
    Format("gptq", has_order=True),
    Format("pack-quantized", group_size=64),
    Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True),
]
NAME = "model.safetensors"


def save_quantised(directory: Path, family: str, how: Format) -> set[str]:
    """Writes the checkpoint, and in `meant` the plain one that it means -> names of the quantised matrices."""
    config = tiny_config(family)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    save_tiny_model(directory, config)
    shutil.copytree(directory, directory / "meant")
    meant = load_file(directory / NAME)
    names = {name for name in meant if name.startswith("model.layers.") and meant[name].dim() == 2}
    names -= {name for name in names if name.endswith("gate.weight")}
    tensors = {name: tensor for name, tensor in meant.items() if name not in names}
    for name in names:
        stored, meant[name] = quantise(meant[name], how)
        tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, directory / NAME, {"format": "pt"})
    save_file({name: tensor.float() for name, tensor in meant.items()}, directory / "meant" / NAME, {"format": "pt"})
    change_quantization(directory, how.config)
    return names


@pytest.mark.parametrize("how", FORMATS, ids=lambda how: f"{how.name}{'-ordered' * how.has_order}")
@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_quantised_weights_are_what_they_mean(family: str, how: Format, tmp_path: Path) -> None:
    names = save_quantised(tmp_path, family, how)
    assert any("experts" in name for name in names) is (family == "mixtral")
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path / "meant", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for keeps_blocks in (True, False):
        model, info = load_class(tmp_path, keeps_blocks=keeps_blocks)
        assert bool(model.block_types) is (keeps_blocks and not how.has_order)
        assert_next_token(model, info, oracle)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_blocks_of_a_gguf_file_are_multiplied_as_they_are(
    family: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for experts, which the kernels take as plain numbers."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    if family == "mixtral":
        write_family_gguf(path, save_tiny_model(tmp_path / "saved", tiny_config(family)), of_experts=kind)
    else:
        write_gguf(path, family, random_weights(family, True), kind)
        monkeypatch.setattr(next_token, "PROMPT", next_token.PROMPT % VOCAB)
    directory = resolve_checkpoint(str(path), impl="transformers").directory
    oracle = AutoModelForCausalLM.from_pretrained(
        with_safetensors(directory), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for keeps_blocks in (True, False):
        model, info = load_class(directory, keeps_blocks=keeps_blocks)
        assert model.block_types == ([kind.name] if keeps_blocks and family != "mixtral" else [])
        assert_next_token(model, info, oracle)
