"""A small config.json, for every family."""

import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


_NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    **{family: {"full_attention_interval": 3} for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "lfm2": {"full_attn_idxs": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "bamba": {"attn_layer_indices": [1]},
}


def base_of(family: str) -> dict[str, Any]:
    """BASE with the model_type, and keys without which the family's files are refused."""
    return {"model_type": family, **BASE, **_NEEDED.get(family, {})}


def write(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
