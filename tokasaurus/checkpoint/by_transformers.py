"""What transformers' own class of a model computes, for a config.json that is not in the table of families.

A process of its own reads it (model/by_transformers/probe), since that imports torch; the result is cached for the
file's content and the version of transformers. Needs no torch itself.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.cache import build_once, cache_directory, cache_key
from tokasaurus.checkpoint.json_files import CheckpointError, read_json
from tokasaurus.checkpoint.own_process import run_main
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec

_PROBE = "tokasaurus.model.by_transformers.probe"
_MAX_SECONDS = 300
_VERSION = 7
"""Part of the cache key: increase it when the probe finds more, or something else."""


def read_facts(path: Path) -> Mapping[str, Any]:
    """What the probe says of a config.json. Raises CheckpointError if the class cannot be served, with its reason, and
    CheckpointUnavailable if the probe is killed or the cache cannot be written."""

    def build(directory: Path) -> None:
        found = run_main(_PROBE, str(path), failing="transformers cannot make its class", max_seconds=_MAX_SECONDS)
        if error := json.loads(found).get("error"):  # not kept: a package may be installed
            raise CheckpointError(str(error))
        (directory / "facts.json").write_text(found, encoding="utf-8")

    versions = importlib.metadata.version("transformers"), importlib.metadata.version("torch")
    key = cache_key(_VERSION, *versions, path.read_bytes())
    return read_json(build_once(cache_directory() / "by_transformers" / key, build) / "facts.json")


def spec_of(facts: Mapping[str, Any]) -> ModelSpec:
    """The sizes and the attention of the model: all else is in its class, and has no spec."""
    mlp = MLPSpec(facts["width"])
    layers = tuple(LayerSpec(AttentionSpec(**each, rotary=None), mlp, None, None) for each in facts["layers"])
    no_norm = NormSpec(1e-6, has_weight=False)
    return ModelSpec(layers, facts["hidden_size"], facts["vocab_size"], no_norm, rotary=())
