"""Small models whose weights are quantised, in safetensors files."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoint.helpers.quantised_weights import Format, quantise, random_mxfp4
from tests.helpers.tiny_model import family_config, option_config, save_random_model

_LEFT_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
WITH_EXPERTS = ("qwen3_moe", "mixtral")
_MATRIX = re.compile(r"(proj|w[123])\.weight$")
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight$")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": _LEFT_PLAIN}
"""quantization_config of gpt-oss."""


def save_quantised_model(
    directory: Path, family: str, how: Format, tied: bool = False, num_layers: int = 2, has_quantised_head: bool = False
) -> PreTrainedModel:
    """Writes a checkpoint whose layers are quantised, and perhaps the LM head, in two files; returns the model with the
    weights that they mean. family: perhaps one of WITH_EXPERTS, each of which is quantised by itself, but no router."""
    if family in WITH_EXPERTS:
        config = option_config(family, 0, tied, num_hidden_layers=num_layers, moe_intermediate_size=128)
    else:
        config = family_config(family, tied, num_layers=num_layers)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    model = save_random_model(directory, config)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    quantised = [name for name in tensors if name.startswith("model.layers.") and _MATRIX.search(name)]
    for name in [*quantised, *(["lm_head.weight"] if has_quantised_head else [])]:
        stored, weight = quantise(tensors.pop(name), how)
        tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in stored.items()}
        _weight_of(model, name).copy_(weight)
    names = sorted(tensors)  # a weight's parts may be in different files
    files = {f"model-0000{index + 1}-of-00002.safetensors": names[index::2] for index in range(2)}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path.unlink()
    change_quantization(directory, how.config)
    return model


def _weight_of(model: PreTrainedModel, name: str) -> torch.Tensor:
    """What the model has of a weight of the checkpoint: in its class, experts are together, gates before ups."""
    meant: dict[str, torch.Tensor] = model.state_dict()
    found = _EXPERT.search(name)
    if found is None:
        return meant[name]
    layer, expert, which = found.groups()
    experts = f"model.layers.{layer}.mlp.experts"
    if which in ("w2", "down_proj"):
        return meant[f"{experts}.down_proj"][int(expert)]
    gate, up = meant[f"{experts}.gate_up_proj"][int(expert)].chunk(2)
    return gate if which in ("w1", "gate_proj") else up


def save_gpt_oss(directory: Path) -> PreTrainedModel:
    """Writes a checkpoint as OpenAI's, whose experts are MXFP4 and all else bfloat16; returns the model with the
    weights that it means."""
    model = save_random_model(
        directory, option_config("gpt_oss", 0, hidden_size=96, intermediate_size=64, num_local_experts=4)
    )
    path = directory / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    with torch.no_grad():
        for seed, (name, weight) in enumerate(model.state_dict().items()):
            if name.endswith(("gate_up_proj", "down_proj")):
                count, num_inputs, num_outputs = tensors.pop(name).shape
                stored, meant = random_mxfp4(count, num_outputs, num_inputs, seed)
                tensors |= {f"{name}_{part}": tensor for part, tensor in stored.items()}
                weight.copy_(meant)
            else:
                weight.copy_(tensors[name])
    save_file(tensors, path)
    change_quantization(directory, MXFP4)
    return model


def change_quantization(directory: Path, quantization: object) -> None:
    """Write this quantization_config."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
