"""Every key that transformers reads from config.json and generation_config.json for the supported families, and what
becomes of it here.

tests/checkpoint/test_config_keys.py holds the tables against transformers' source: a key that a new version reads makes
it fail. A key that transformers does not read has no effect there, and none here.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from tokasaurus.checkpoint.families import Family
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.quantized.config import QUANTIZATION_KEYS
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, MODEL_DEFAULTS, SamplingParams


class Use(Enum):
    """What becomes of a key."""

    APPLIED = "applied"
    REFUSED = "refused unless its value changes nothing"
    REPORTED = "left to each request, with one log line where its value would change transformers' output"
    NO_EFFECT = "without effect on tokens, here and in transformers"


def _keys(use: Use, *names: str) -> dict[str, Use]:
    return dict.fromkeys(names, use)


CONFIG_KEYS: dict[str, Use] = {
    **_keys(Use.APPLIED, "model_type", "architectures", "dtype", "torch_dtype", "hidden_act", "layer_types"),
    **_keys(Use.APPLIED, "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    **_keys(Use.APPLIED, "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    **_keys(Use.APPLIED, "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
    **_keys(Use.APPLIED, "tie_word_embeddings", "eos_token_id", *QUANTIZATION_KEYS),
    **_keys(Use.REFUSED, "partial_rotary_factor", "is_causal", "is_encoder_decoder"),
    # They ask for weights that this code does not read, or layers that it does not build.
    **_keys(Use.REFUSED, "transformers_weights", "fusion_config", "per_layer_config"),
    # The cache of keys and values forgets some of them.
    **_keys(Use.REFUSED, "attention_chunk_size", "kv_sharing_modes"),
    # Of some families, which apply or refuse them: see families.
    **_keys(Use.NO_EFFECT, "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    **_keys(Use.NO_EFFECT, "attention_dropout", "initializer_range", "pretraining_tp", "chunk_size_feed_forward"),
    **_keys(Use.NO_EFFECT, "use_cache", "return_dict", "output_hidden_states", "output_attentions"),
    **_keys(Use.NO_EFFECT, "attn_implementation", "experts_implementation", "distributed_config"),
    **_keys(Use.NO_EFFECT, "gradient_checkpointing"),
    **_keys(Use.NO_EFFECT, "_attn_implementation", "_experts_implementation", "number_of_conv_states"),
    **_keys(Use.NO_EFFECT, "bos_token_id", "pad_token_id", "name_or_path", "_name_or_path", "_commit_hash"),
    **_keys(Use.NO_EFFECT, "id2label", "label2id", "num_labels", "problem_type", "transformers_version"),
}
"""Keys of config.json that every family has; see keys_of. transformers 5 drops keys of GENERATION_KEYS from it, so they
have no effect there."""

GENERATION_KEYS: dict[str, Use] = {
    **_keys(Use.APPLIED, "eos_token_id", *MODEL_DEFAULTS),
    **_keys(Use.REPORTED, "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"),
    **_keys(Use.REPORTED, "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"),
    **_keys(Use.REPORTED, "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    **_keys(Use.REPORTED, "min_length", "min_new_tokens", "stop_strings", "guidance_scale", "watermarking_config"),
    **_keys(Use.REPORTED, "num_beams", "token_healing", "penalty_alpha", "dola_layers", "num_return_sequences"),
    **_keys(Use.REPORTED, "renormalize_logits", "remove_invalid_values", "constraints", "force_words_ids"),
    # Settings of beam search and of encoders, and limits and ids that every request has.
    **_keys(Use.NO_EFFECT, "do_sample", "length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups"),
    **_keys(Use.NO_EFFECT, "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "decoder_start_token_id"),
    **_keys(Use.NO_EFFECT, "max_length", "max_new_tokens", "max_time", "bos_token_id", "pad_token_id"),
    # How tokens are computed and returned: they stay the same.
    **_keys(Use.NO_EFFECT, "use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp"),
    **_keys(Use.NO_EFFECT, "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    **_keys(Use.NO_EFFECT, "low_memory", "output_attentions", "output_hidden_states", "output_scores"),
    **_keys(Use.NO_EFFECT, "output_logits", "return_dict_in_generate", "is_assistant", "num_assistant_tokens"),
    **_keys(Use.NO_EFFECT, "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    **_keys(Use.NO_EFFECT, "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    **_keys(Use.NO_EFFECT, "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    **_keys(Use.NO_EFFECT, "speculation_type", "_from_model_config", "transformers_version"),
}
"""Keys of generation_config.json. The sampling parameters among the applied ones are defaults for requests, if the flag
sampling_defaults= does not say otherwise."""

OTHER_SAMPLING = "general.sampling."
"""Begins the keys of a GGUF file's sampling settings that generation_config.json has no name for."""

_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0}
_NEUTRAL |= {"repetition_penalty": 1.0, "num_beams": 1, "guidance_scale": 1.0, "num_return_sequences": 1}
"""Generation settings' values that change nothing; for every key, also null, false, 0 and empty values."""

_CHANGES_NOTHING = {"is_causal": (True,)}
"""Refused key -> its allowed values; for any other key: null, false, 0 and empty values."""


def keys_of(family: Family) -> dict[str, Use]:
    """Keys of config.json, for one family."""
    own = _keys(Use.APPLIED, *family.applied) | _keys(Use.REFUSED, *family.refused)
    if family.has_partial_rotary:
        own["partial_rotary_factor"] = Use.APPLIED
    return {**CONFIG_KEYS, **own, **_keys(Use.NO_EFFECT, *family.without_effect)}


def refuse_keys(config: Mapping[str, Any], family: Family, name: str) -> None:
    """Raises CheckpointError for a refused key whose value would change the computation. name: the family's."""
    for key, use in keys_of(family).items():
        allowed = _CHANGES_NOTHING.get(key)
        if use is not Use.REFUSED or key not in config or key == "partial_rotary_factor":  # it has an error of its own
            continue
        if config[key] not in allowed if allowed is not None else config[key]:
            raise CheckpointError(f"{key} = {config[key]!r} is not supported for {name}")


def left_to_requests(generation: Mapping[str, Any], applies_sampling: bool) -> list[str]:
    """Settings of generation_config.json that transformers' generate would use by default and this server does not, as
    `name=value`. top_k and the like count only where do_sample is on.

    applies_sampling: the server uses sampling_defaults_of; it does so whatever do_sample is."""
    sampling = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
    reported = {name for name, use in GENERATION_KEYS.items() if use is Use.REPORTED}
    if not applies_sampling:
        reported.update(MODEL_DEFAULTS)
    left = [
        f"{name}={value!r}"
        for name, value in generation.items()
        if (name in reported or name.startswith(OTHER_SAMPLING))
        and (generation.get("do_sample") or name not in sampling)
        and value
        and value != _NEUTRAL.get(name)
    ]
    if applies_sampling and generation.get("do_sample") is False and sampling_defaults_of(generation).temperature:
        left.append("do_sample=False, which temperature=0 is here")
    return left


def sampling_defaults_of(generation: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters that generation_config.json has. null is none; do_sample does not matter, as in vLLM: the
    values count as they are written. Raises CheckpointError for one that is out of range."""
    found: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        value, parameter = generation.get(name), CLIENT_PARAMETERS[name]
        if value is None:
            continue
        is_whole = isinstance(parameter.default, int)
        if is_whole and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) not in ((int,) if is_whole else (int, float)) or not parameter.allows(value):
            raise CheckpointError(
                f"{name} must be {parameter.range}, not {value!r}; sampling_defaults=neutral leaves it out"
            )
        found[name] = max(value, 0) if is_whole else float(value)
    return SamplingParams(**found)
