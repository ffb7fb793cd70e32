"""The table of model families: one short file for each group of them.

Knows the keys of each family's config.json and the names of its stored tensors. Does not know how a layer is computed.
"""

from tokasaurus.checkpoint.families import (
    biases,
    cohere,
    exaone,
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
)

FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
"""By model_type in config.json."""

_BESIDE_TEXT = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", *QUANTIZATION_KEYS)
"""Keys that stand beside text_config and say something of the text model."""


def text_fields(config: Fields) -> Fields:
    """config.json of a checkpoint's text model: the whole file, or its text_config where the checkpoint has a model for
    images too. Raises CheckpointError."""
    for name, family in FAMILIES.items():
        if family.with_images is not None and config.get("model_type") == family.with_images[0]:
            text = json_object(config, "text_config")
            whole = config.get("architectures") or [family.with_images[1]]
            if whole != [family.with_images[1]] or text.get("model_type", name) != name:
                raise CheckpointError(
                    f"architectures {whole} with a text model of model_type {text.get('model_type')!r} is not supported"
                )
            beside = {key: config[key] for key in _BESIDE_TEXT if config.get(key) is not None}
            return {**text, **beside, "model_type": name, "architectures": [family.architecture]}
    return config


__all__ = ["FAMILIES", "Family", "Settings", "StoredTensors", "text_fields"]
