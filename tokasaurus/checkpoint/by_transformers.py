"""What transformers' own class of a model computes, for a config.json that is not in the table of families.

A process of its own reads it (model/by_transformers/probe), since that imports torch; the result is cached for the
file's content and the version of transformers. Needs no torch itself.
"""

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.cache import build_once, cache_directory, cache_key
from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable, read_json
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from tokasaurus.inherited import python_command

_PROBE = "tokasaurus.model.by_transformers.probe"
_MAX_SECONDS = 300
_VERSION = 7
"""Part of the cache key: increase it when the probe finds more, or something else."""


def read_facts(path: Path) -> Mapping[str, Any]:
    """What the probe says of a config.json. Raises CheckpointError if the class cannot be served, with its reason, and
    CheckpointUnavailable if the probe is killed or the cache cannot be written."""

    def build(directory: Path) -> None:
        found = _run(path)
        if error := json.loads(found).get("error"):  # not kept: a package may be installed
            raise CheckpointError(str(error))
        (directory / "facts.json").write_text(found, encoding="utf-8")

    versions = importlib.metadata.version("transformers"), importlib.metadata.version("torch")
    key = cache_key(_VERSION, *versions, path.read_bytes())
    return read_json(build_once(cache_directory() / "by_transformers" / key, build) / "facts.json")


def _run(path: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    command = [*python_command(f"from {_PROBE} import main; main()"), str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        result = subprocess.run(command, check=False, env=environment, timeout=_MAX_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"its class takes more than {_MAX_SECONDS} s to make, even without weights") from None
    if result.returncode == 0:
        return str(result.stdout)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"the process ended with status {result.returncode}"
    is_killed = result.returncode < 0 or reason.startswith("MemoryError")
    raise (CheckpointUnavailable if is_killed else CheckpointError)(f"transformers cannot make its class: {reason}")


def spec_of(facts: Mapping[str, Any]) -> ModelSpec:
    """The sizes and the attention of the model: all else is in its class, and has no spec."""
    mlp = MLPSpec(facts["width"])
    layers = tuple(LayerSpec(AttentionSpec(**each, rotary=None), mlp, None, None) for each in facts["layers"])
    no_norm = NormSpec(1e-6, has_weight=False)
    return ModelSpec(layers, facts["hidden_size"], facts["vocab_size"], no_norm, rotary=())
