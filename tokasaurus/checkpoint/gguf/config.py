"""Converts a GGUF file's metadata to config.json and generation_config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.config_keys import OTHER_SAMPLING
from tokasaurus.checkpoint.gguf.model import ARCHITECTURES
from tokasaurus.checkpoint.json_files import CheckpointError

Metadata = Mapping[str, Any]

# Keys that are read below, and keys that do not affect the computation. Any other key of the architecture is refused:
# it may be a scale or an attention window that this code does not apply.
_READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
_HARMLESS = {"vocab_size", "rope.scaling.finetuned"}
# Keys of unsupported features, each accepted only with the value that switches the feature off.
_OFF = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
}

_SAMPLING_NAMES = {
    f"{OTHER_SAMPLING}temp": "temperature",
    f"{OTHER_SAMPLING}top_k": "top_k",
    f"{OTHER_SAMPLING}top_p": "top_p",
    f"{OTHER_SAMPLING}min_p": "min_p",
    f"{OTHER_SAMPLING}penalty_repeat": "repetition_penalty",
}
"""llama.cpp's conversion writes these from a generation_config.json."""

CONTROL_TOKEN = 3
"""Type of a token in a GGUF file."""

# Texts of tokens that llama.cpp counts as ends of a turn, whatever ids the metadata name. It overrides their type,
# while here only control tokens count.
_TURN_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "</s>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with a fullwidth bar
    *("<EOT>", "< EOT >", "_<EOT>", "_< EOT >", "[EOT]", "[EOS]"),
}

# All published llama3 scalings share these values; the factor, 8 (3.1) or 32 (3.2), is derived from the tensor.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(
    architecture: str,
    metadata: Metadata,
    vocab_size: int,
    tied: bool,
    dtype: str,
    rope_factors: NDArray[np.float32] | None,
) -> dict[str, Any]:
    """The content of config.json.

    architecture: one of ARCHITECTURES. vocab_size: rows of the embedding. tied: the LM head shares the embedding's
    weights. dtype: of the weights, such as "float32". rope_factors: float32 [head size / 2], multipliers of the rotary
    wavelengths, from the file's rope_freqs.weight; None if the file has no such tensor. Raises CheckpointError.
    """
    fields = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse_unknown(architecture, fields)
    num_heads = _number(architecture, fields, "attention.head_count")
    hidden_size = _number(architecture, fields, "embedding_length")
    head_dim = fields.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{architecture}.{key} = {fields[key]} differs from the head size {head_dim}")
    theta = _shortest(fields.get("rope.freq_base", 10000.0))
    scaling = _scaling(architecture, fields)
    if rope_factors is not None:
        if scaling["rope_type"] != "default":
            raise CheckpointError(f"{architecture}.rope.scaling.type and rope_freqs.weight are not supported together")
        scaling = _llama3_scaling(theta, head_dim, rope_factors)
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": _number(architecture, fields, "feed_forward_length"),
        "num_hidden_layers": _number(architecture, fields, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _number(architecture, fields, "context_length"),
        "rms_norm_eps": _shortest(_number(architecture, fields, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": theta, **scaling},
        "tie_word_embeddings": tied,
        "vocab_size": vocab_size,
        "dtype": dtype,
        **_token_ids(metadata),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """The content of generation_config.json. Sampling settings of which it has no equal keep their names."""
    sampling = {key: value for key, value in metadata.items() if key.startswith(OTHER_SAMPLING)}
    values = {key: _shortest(value) if isinstance(value, float) else value for key, value in sampling.items()}
    return {_SAMPLING_NAMES.get(key, key): value for key, value in values.items()} | _token_ids(metadata)


def _token_ids(metadata: Metadata) -> dict[str, Any]:
    """bos and eos ids; the tokens for end of turn (eot) and end of message (eom), and control tokens whose text ends a
    turn, end the generation as well."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    controls = (index for index, token_type in enumerate(types) if token_type == CONTROL_TOKEN)
    ends += [index for index in controls if tokens[index] in _TURN_ENDS]
    ids: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        ids["bos_token_id"] = bos
    return ids


def _refuse_unknown(architecture: str, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, list):
            raise CheckpointError(f"{architecture}.{key} differs by layer, which is not supported")
        if key in _READ or key in _HARMLESS or (key in _OFF and value == _OFF[key]):
            continue
        raise CheckpointError(f"{architecture}.{key} = {value!r} is not supported")


def _scaling(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary scaling that the metadata state; llama.cpp computes linear and YaRN as transformers does."""
    scaling_type = fields.get("rope.scaling.type", "none")
    if scaling_type == "none":
        return {"rope_type": "default"}
    if scaling_type not in ("linear", "yarn"):
        raise CheckpointError(f"{architecture}.rope.scaling.type = {scaling_type!r} is not supported")
    scaling = {"rope_type": scaling_type, "factor": _shortest(_number(architecture, fields, "rope.scaling.factor"))}
    if scaling_type == "yarn":
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = _number(architecture, fields, key)
    return scaling


def _number(architecture: str, fields: Mapping[str, Any], key: str) -> Any:
    value = fields.get(key)
    if not isinstance(value, (int, float)):
        raise CheckpointError(f"{architecture}.{key} is missing")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that denotes the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(theta: float, head_dim: int, factors: NDArray[np.float32]) -> dict[str, Any]:
    """The llama3 parameters that produce these factors; the file does not state them. Raises CheckpointError."""
    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_SCALING}
    expected = [llama3_factor(theta ** (2 * i / head_dim) * 2 * math.pi, scaling) for i in range(head_dim // 2)]
    if factors.shape != (head_dim // 2,) or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError("rope_freqs.weight contains rotary factors that are not the Llama 3 scaling")
    return scaling


def llama3_factor(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """Factor by which Llama 3.1 multiplies a rotary wavelength (in tokens). Source: the model card's reference code."""
    num_rotations = scaling["original_max_position_embeddings"] / wavelength
    if num_rotations > scaling["high_freq_factor"]:
        return 1.0
    if num_rotations < scaling["low_freq_factor"]:
        return float(scaling["factor"])
    smooth = (num_rotations - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    return float(1 / ((1 - smooth) / scaling["factor"] + smooth))
