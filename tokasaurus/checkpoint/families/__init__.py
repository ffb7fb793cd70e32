"""The table of model families: one short file for each group of them.

Knows the keys of each family's config.json and the names of its stored tensors. Does not know how a layer is computed.
"""

from tokasaurus.checkpoint.families import llama
from tokasaurus.checkpoint.families.family import Family, Settings, StoredTensors

FAMILIES: dict[str, Family] = {**llama.FAMILIES}
"""By model_type in config.json."""

__all__ = ["FAMILIES", "Family", "Settings", "StoredTensors"]
