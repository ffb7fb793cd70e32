"""Converts a GGUF file's metadata to config.json and generation_config.json."""

import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.config_keys import OTHER_SAMPLING
from tokasaurus.checkpoint.families import FAMILIES, Family
from tokasaurus.checkpoint.families.family import FULL, SLIDING
from tokasaurus.checkpoint.gguf.model import ROPE_FACTORS, family_of, num_draft_layers
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.rope import magnitude

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
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Keys of YaRN, and the setting of config.json that each is."""
_BY_FAMILY = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attention.temperature_scale": ("llama_4_scaling_beta",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size_mlp",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
}
"""Keys, and the field of config.json that each is, by its name in one family or another."""
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_FLAGS = {
    "attention_bias": "self_attn.q_proj.bias",
    "use_bias": "self_attn.q_proj.bias",
    "qkv_bias": "self_attn.q_proj.bias",
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.up_proj.bias",
    "qk_layernorm": "self_attn.q_norm.weight",
    "use_qk_norm": "self_attn.q_norm.weight",
}
"""Fields that say whether there is a tensor, which the metadata leave to the tensors."""
_HARMLESS = {"vocab_size", "rope.scaling.finetuned"}
# Keys of unsupported features, each accepted only with the value that switches the feature off.
_OFF = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
# Layers of the models whose scores are scaled by the heads' part of the hidden size, and not by their own size: Gemma 2
# and 3 with 27B parameters. llama.cpp knows them by this too.
_SCALED_BY_HIDDEN_SIZE = (46, 62)
# Experts of the Llama 4 model whose queries and keys are not normalised: Maverick. llama.cpp knows it by this too.
_WITHOUT_QUERY_KEY_NORM = 128

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

# All published llama3 scalings share these values, but for the last factor, which is 4 or, of Llama 4, 1; the factor, 8
# (3.1), 32 (3.2) or 16 (4), is derived from the tensor.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
_HIGH_FREQ_FACTORS = (4.0, 1.0)


def model_config(
    architecture: str,
    metadata: Metadata,
    vocab_size: int,
    names: Container[str],
    dtype: str,
    rope_factors: Mapping[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """The content of config.json.

    architecture: one of ARCHITECTURES. vocab_size: rows of the embedding. names: of the tensors, in Hugging Face
    format. dtype: of the weights, such as "float32". rope_factors: float32 [rotated channels / 2], multipliers of the
    rotary wavelengths, by the names of ROPE_FACTORS. Raises CheckpointError.
    """
    fields = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    name = family_of(architecture, fields)
    family = FAMILIES[name]
    assert family.gguf is not None
    num_heads = _number(architecture, fields, "attention.head_count")
    hidden_size = _number(architecture, fields, "embedding_length")
    num_layers = _number(architecture, fields, "block_count") - num_draft_layers(family, fields)
    head_dim = fields.get("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [family.architecture],
        "model_type": name,
        "hidden_size": hidden_size,
        "intermediate_size": _number(architecture, fields, "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _number(architecture, fields, "context_length"),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "vocab_size": vocab_size,
        "dtype": dtype,
        **_by_family(architecture, family, fields),
        **_token_ids(metadata),
    }
    for flag, tensor in _FLAGS.items():
        if flag in family.applied:
            module, _, kind = tensor.rpartition(".")
            config[flag] = f"model.layers.0.{family.stored.name(module)}.{kind}" in names
    if "query_pre_attn_scalar" in family.applied:
        is_large = num_layers in _SCALED_BY_HIDDEN_SIZE
        config["query_pre_attn_scalar"] = hidden_size // num_heads if is_large else head_dim
    if "attention_chunk_size" in family.applied:  # a norm without weights has no tensor
        config["use_qk_norm"] = fields.get("expert_count") != _WITHOUT_QUERY_KEY_NORM
    if "sliding_window" in family.applied and "attention.sliding_window_pattern" in fields:
        config["layer_types"] = _layer_types(fields["attention.sliding_window_pattern"], num_layers)
    num_rotated = fields.get("rope.dimension_count", head_dim)
    for key, value in (("attention.value_length", fields.get("attention.value_length", head_dim)),) + (
        () if family.has_partial_rotary else (("rope.dimension_count", num_rotated),)
    ):
        if value != head_dim:
            raise CheckpointError(f"{architecture}.{key} = {value} differs from the head size {head_dim}")
    theta = _shortest(fields.get("rope.freq_base", 10000.0))
    rope = {"rope_theta": theta, **_scaling(architecture, fields, num_rotated, rope_factors)}
    if family.has_partial_rotary:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    if "truncate" in config:
        rope["truncate"] = config.pop("truncate")
    if config.get("llama_4_scaling_beta") is not None:
        rope["llama_4_scaling_beta"] = config.pop("llama_4_scaling_beta")
    by_type = "rope_local_base_freq" in family.applied
    local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 10000.0)}
    return {
        **config,
        "rope_theta": theta,
        "rope_parameters": {FULL: rope, SLIDING: local} if by_type else rope,
    }


def _by_family(architecture: str, family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that not every family has. Raises CheckpointError for a key that is not applied."""
    assert family.gguf is not None
    found: dict[str, Any] = {"sliding_window": None} if "sliding_window" in family.applied else {}
    found.update(family.gguf.fields)
    if "use_sliding_window" in family.applied:  # a window then needs more keys than there are
        found.pop("sliding_window", None)
    applied = {*family.applied, *found, "rms_norm_eps", "num_nextn_predict_layers"}
    if "use_sliding_window" in family.applied:
        applied -= {"sliding_window"}
    for key, value in fields.items():
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            raise CheckpointError(f"{architecture}.{key} differs by layer, which is not supported")
        if key in family.gguf.required:
            if value != family.gguf.required[key]:
                raise CheckpointError(f"{architecture}.{key} = {value!r} is not supported")
            continue
        target = next((field for field in _BY_FAMILY.get(key, ()) if field in applied), None)
        if target is not None:
            is_off = key in _OFF and value == _OFF[key]
            found[target] = None if is_off else _shortest(value) if isinstance(value, float) else value
        elif not (key in _READ | _HARMLESS or key in family.gguf.ignored or (key in _OFF and value == _OFF[key])):
            raise CheckpointError(f"{architecture}.{key} = {value!r} is not supported")
    if not any(isinstance(fields.get(key), float) for key in _EPSILONS):
        raise CheckpointError(f"{architecture}.{_EPSILONS[0]} is missing")
    return found


def _layer_types(pattern: Any, num_layers: int) -> list[str]:
    """pattern: whether each layer has a window, or each how many layers one has none."""
    if type(pattern) is int and pattern > 0:
        pattern = [(index + 1) % pattern != 0 for index in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) < num_layers:
        raise CheckpointError(f"attention.sliding_window_pattern = {pattern!r} is not supported")
    return [SLIDING if each else FULL for each in pattern[:num_layers]]


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


def _scaling(
    architecture: str, fields: Mapping[str, Any], num_rotated: int, factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    """The rotary scaling that metadata and tensors state; llama.cpp computes linear and YaRN as transformers does."""
    plain, short, long = (factors.get(name) for name in ROPE_FACTORS)
    scaling_type, key = fields.get("rope.scaling.type", "none"), "rope.scaling.original_context_length"
    attention_factor = fields.get("rope.scaling.attn_factor", 1.0)
    of_yarn = {name: _shortest(fields[each]) for each, name in _YARN.items() if each in fields}
    if (short is None) != (long is None) or (plain is not None and short is not None):
        raise CheckpointError(f"of {', '.join(ROPE_FACTORS)}, a model has the first alone, or both others")
    if short is not None and long is not None and scaling_type in ("none", "longrope"):
        return {
            "rope_type": "longrope",
            "short_factor": [_shortest(each) for each in short],
            "long_factor": [_shortest(each) for each in long],
            "original_max_position_embeddings": _number(architecture, fields, key),
            "attention_factor": _shortest(attention_factor),
        }
    if scaling_type != "yarn" and (attention_factor != 1 or of_yarn):
        wrong = next((each for each in _YARN if each in fields), "rope.scaling.attn_factor")
        raise CheckpointError(f"{architecture}.{wrong} = {fields[wrong]!r} is not supported with {scaling_type!r}")
    if scaling_type == "none" and plain is not None:
        return _llama3_scaling(_shortest(fields.get("rope.freq_base", 10000.0)), num_rotated, plain)
    if plain is not None or short is not None:
        raise CheckpointError(f"{architecture}.rope.scaling.type and rotary factors are not supported together")
    if scaling_type == "none":
        return {"rope_type": "default"}
    if scaling_type not in ("linear", "yarn"):
        raise CheckpointError(f"{architecture}.rope.scaling.type = {scaling_type!r} is not supported")
    scaling = {"rope_type": scaling_type, "factor": _shortest(_number(architecture, fields, "rope.scaling.factor"))}
    if scaling_type == "yarn":
        scaling["original_max_position_embeddings"] = _number(architecture, fields, key)
        scaling.update({"mscale": 1.0, **of_yarn} if "mscale_all_dim" in of_yarn else of_yarn)
        if attention_factor != 1:
            own = magnitude(scaling["factor"], 1.0) / magnitude(scaling["factor"], of_yarn.get("mscale_all_dim", 0.0))
            scaling["attention_factor"] = _shortest(attention_factor) * of_yarn.get("attention_factor", own)
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
    for high in _HIGH_FREQ_FACTORS:
        scaling = {"factor": float(factors.max()), "high_freq_factor": high, **_LLAMA3_SCALING}
        expected = [llama3_factor(theta ** (2 * i / head_dim) * 2 * math.pi, scaling) for i in range(head_dim // 2)]
        if factors.shape == (head_dim // 2,) and np.allclose(factors, expected, rtol=1e-4):
            return {"rope_type": "llama3", **scaling}
    raise CheckpointError("rope_freqs.weight contains rotary factors that are not the Llama 3 scaling")


def llama3_factor(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """Factor by which Llama 3.1 multiplies a rotary wavelength (in tokens). Source: the model card's reference code."""
    num_rotations = scaling["original_max_position_embeddings"] / wavelength
    if num_rotations > scaling["high_freq_factor"]:
        return 1.0
    if num_rotations < scaling["low_freq_factor"]:
        return float(scaling["factor"])
    smooth = (num_rotations - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    return float(1 / ((1 - smooth) / scaling["factor"] + smooth))
