"""The table of model families: one short file for each group of them.

Knows the keys of each family's config.json and the names of its stored tensors. Does not know how a layer is computed.
"""

from tokasaurus.checkpoint.families import (
    biases,
    cohere,
    exaone,
    experts,
    gemma,
    glm,
    granite,
    hunyuan,
    hyperclova,
    llama,
    mistral,
    olmo,
    phi,
    plain_mlps,
    smollm,
    states,
)
from tokasaurus.checkpoint.families.family import Family, Settings, StoredTensors
from tokasaurus.checkpoint.json_files import CheckpointError, Fields, json_object
from tokasaurus.checkpoint.quantized.config import QUANTIZATION_KEYS

_GROUPS = (
    llama,
    mistral,
    smollm,
    olmo,
    gemma,
    phi,
    granite,
    glm,
    exaone,
    cohere,
    plain_mlps,
    biases,
    hyperclova,
    hunyuan,
    experts,
    states,
)

FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
"""By model_type in config.json."""

_BESIDE_TEXT = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", *QUANTIZATION_KEYS)
"""Keys that stand beside text_config and say something of the text model."""


def is_known(config: Fields) -> bool:
    """Whether the table has the model of a config.json, or its text model."""
    name = config.get("model_type")
    outer = {family.with_images[0] for family in FAMILIES.values() if family.with_images is not None}
    return not isinstance(name, str) or name in FAMILIES or name in outer


def text_fields(config: Fields) -> Fields:
    """config.json of a checkpoint's text model: the whole file, or its text_config where the checkpoint has a model for
    images too. Raises CheckpointError."""
    outer = config.get("model_type")
    with_images = {name: family.with_images for name, family in FAMILIES.items() if family.with_images is not None}
    served = {name: architecture for name, (each, architecture) in with_images.items() if each == outer}
    if not served:
        return config
    text = json_object(config, "text_config")
    name = str(text.get("model_type", next(iter(served))))
    architectures = config.get("architectures")
    if name not in served or architectures not in (None, [], [served[name]]):
        raise CheckpointError(
            f"architectures {architectures} with a text model of model_type {name!r} is not supported"
        )
    beside = {key: config[key] for key in _BESIDE_TEXT if config.get(key) is not None}
    return {**text, **beside, "model_type": name, "architectures": [FAMILIES[name].architecture]}


__all__ = ["FAMILIES", "Family", "Settings", "StoredTensors", "is_known", "text_fields"]
