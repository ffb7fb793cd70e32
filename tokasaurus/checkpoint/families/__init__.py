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
    llama,
    mistral,
    olmo,
    phi,
    plain_mlps,
    smollm,
)
from tokasaurus.checkpoint.families.family import Family, Settings, StoredTensors

_GROUPS = llama, mistral, smollm, olmo, gemma, phi, granite, glm, exaone, cohere, plain_mlps, biases

FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
"""By model_type in config.json."""

__all__ = ["FAMILIES", "Family", "Settings", "StoredTensors"]
