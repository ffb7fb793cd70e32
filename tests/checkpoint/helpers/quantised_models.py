"""Small models whose weights are quantised, in safetensors files."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoint.helpers.quantised_weights import Format, quantise
from tests.helpers.tiny_model import family_config, save_random_model


def save_quantised_model(
    directory: Path, family: str, how: Format, tied: bool = False, num_layers: int = 2, has_quantised_head: bool = False
) -> PreTrainedModel:
    """Writes a checkpoint whose layers are quantised, and perhaps the LM head, in two files; returns the model with the
    weights that they mean."""
    config = family_config(family, tied, num_layers=num_layers)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    model = save_random_model(directory, config)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    meant = model.state_dict()
    quantised = [name for name in tensors if name.startswith("model.layers.") and name.endswith("proj.weight")]
    for name in [*quantised, *(["lm_head.weight"] if has_quantised_head else [])]:
        stored, weight = quantise(tensors.pop(name), how)
        tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in stored.items()}
        meant[name].copy_(weight)
    names = sorted(tensors)  # a weight's parts may be in different files
    files = {f"model-0000{index + 1}-of-00002.safetensors": names[index::2] for index in range(2)}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path.unlink()
    change_quantization(directory, how.config)
    return model


def change_quantization(directory: Path, quantization: object) -> None:
    """Write this quantization_config."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
