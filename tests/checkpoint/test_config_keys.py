"""The lists of understood keys, held against the source of transformers, and each key's use against what is read."""

import ast
import importlib
import inspect
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    Llama4VisionConfig,
    PretrainedConfig,
    cache_utils,
    configuration_utils,
    masking_utils,
    modeling_rope_utils,
    modeling_utils,
)
from transformers.models.qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeVisionConfig

from tests.checkpoint.helpers.configs import BASE, base_of, write
from tokasaurus.checkpoint import CheckpointError, read_model_info
from tokasaurus.checkpoint.config_keys import GENERATION_KEYS, Use
from tokasaurus.checkpoint.config_keys import keys_of as keys_of_family
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.checkpoint.info import notes_on_settings, read_sampling_defaults
from tokasaurus.checkpoint.rope import ROPE_KEYS, ROPE_TYPES
from tokasaurus.messages.sampling import SamplingParams

WITH_VISION = {
    "llama4_text": Llama4VisionConfig,
    "qwen3_5_text": Qwen3_5VisionConfig,
    "qwen3_5_moe_text": Qwen3_5MoeVisionConfig,
}
NOT_IN_FILES = {
    # What transformers sets itself.
    *("_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions", "__class__"),
    *("sub_configs", "sub_configs_defaults", "is_heterogeneous", "_post_init_done"),
    *("base_model_tp_plan", "base_model_pp_plan", "attribute_map"),
    # Of classes, which the supported families leave as they are.
    # Of models with images in the same file.
    *("text_config", "vision_config", "mm_tokens_per_image", "image_token_id", "video_token_id"),
    *("default_theta", "default_rope_type", "ignore_keys_at_rope_validation", "_rope_type_labels"),
}


def names_read(source: str, owners: tuple[str, ...]) -> Iterator[str]:
    """Names of the attributes that `source` reads, but not calls, from the objects of these names; getattr counts."""
    tree = ast.parse(textwrap.dedent(source))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called and ast.unparse(node.value) in owners:
            yield node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = node.args[:2]
            if ast.unparse(owner) in owners and isinstance(name, ast.Constant):
                yield str(name.value)


def keys_of(source: str, owners: tuple[str, ...]) -> Iterator[str]:
    """String keys that `source` looks up in the dicts of these names."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) in owners
            and isinstance(node.slice, ast.Constant)
        ):
            yield str(node.slice.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_lookup = node.func.attr in ("get", "pop", "setdefault") and ast.unparse(node.func.value) in owners
            if is_lookup and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_reads_is_listed(family: str) -> None:
    """By the fields of its class, its keyword arguments, and attributes that the model, its masks and cache read."""
    owners = ("config", "self.config", "layer_config", "decoder_config", "effective_config")
    config_class = CONFIG_MAPPING[family]
    modeling = importlib.import_module(MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__module__)
    found = {field.name for field in fields(config_class)}
    found |= set(names_read(inspect.getsource(modeling), owners))
    found |= set(keys_of(inspect.getsource(config_class), ("kwargs",)))
    shared = [masking_utils.create_causal_mask, cache_utils.get_layer_types_and_kwargs, cache_utils.DynamicCache]
    if "sliding_window" in FAMILIES[family].applied:
        shared.append(masking_utils.create_sliding_window_causal_mask)
    for function in (*shared, *modeling_rope_utils.ROPE_INIT_FUNCTIONS.values()):
        found |= set(names_read(inspect.getsource(function), owners))
    for function in (PretrainedConfig.__post_init__, modeling_rope_utils.RotaryEmbeddingConfigMixin):
        found |= set(names_read(inspect.getsource(function), ("self",)))
        found |= set(keys_of(inspect.getsource(function), ("kwargs",)))
    found |= set(names_read(inspect.getsource(modeling_utils.PreTrainedModel.from_pretrained), ("config",)))
    found |= set(names_read(inspect.getsource(modeling_utils.PreTrainedModel.__init__), owners))
    if family in WITH_VISION:  # whose module has classes for images, too
        found -= {field.name for field in fields(WITH_VISION[family])} - {field.name for field in fields(config_class)}
    assert len(found) > 40
    assert found - NOT_IN_FILES - set(keys_of_family(FAMILIES[family])) == set()


def test_every_generation_key_of_transformers_is_listed() -> None:
    assert set(vars(GenerationConfig())) - set(GENERATION_KEYS) == set()
    # Such keys in config.json are dropped by its class.
    dropped = set(GenerationConfig._get_default_generation_params())
    assert dropped - set(GENERATION_KEYS) == set()
    assert "GenerationConfig._get_default_generation_params" in inspect.getsource(configuration_utils)


def test_every_rotary_key_and_type_of_transformers_is_listed() -> None:
    refused = {"proportional"}
    assert set(ROPE_TYPES) | refused == {"default", *modeling_rope_utils.ROPE_INIT_FUNCTIONS}
    assert set(modeling_rope_utils.RopeParameters.__annotations__) - set(ROPE_KEYS) == set()
    for rope_type in ROPE_TYPES[1:]:
        source = inspect.getsource(modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type])
        read = set(keys_of(source, ("rope_parameters_dict", "config.rope_parameters")))
        applied = {key for key, types in ROPE_KEYS.items() if rope_type in types} - {"rope_type", "type"}
        assert read - {"partial_rotary_factor"} == applied


def test_a_key_of_a_new_version_would_be_noticed() -> None:
    source = (
        "def f(self, config):\n    a = getattr(config, 'new_one', 1)\n    return self.config.new_two + config.call()"
    )
    assert set(names_read(source, ("config", "self.config"))) == {"new_one", "new_two"}
    assert set(keys_of("x = fields['a'] + fields.get('b', 1) + other['c']", ("fields",))) == {"a", "b"}


REFUSED_VALUES: dict[str, Any] = {
    **{"is_causal": False, "partial_rotary_factor": 0.5, "attention_chunk_size": 64, "kv_sharing_modes": ["reuse"] * 3},
    **{"transformers_weights": "other.safetensors", "per_layer_config": {"0": {"head_dim": 4}}, "sliding_window": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_key_is_named_and_its_neutral_values_are_accepted(family: str, tmp_path: Path) -> None:
    refused = {name for name, use in keys_of_family(FAMILIES[family]).items() if use is Use.REFUSED}
    base = base_of(family)
    plain = read_model_info(write(tmp_path, base))
    for name in sorted(refused):
        with pytest.raises(CheckpointError, match=name):
            read_model_info(write(tmp_path, {**base, name: REFUSED_VALUES.get(name, True)}))
        neutral = {"is_causal": True, "partial_rotary_factor": 1.0}.get(name)
        assert read_model_info(write(tmp_path, {**base, name: neutral})) == plain
    with pytest.raises(CheckpointError, match="is_causal"):
        read_model_info(write(tmp_path, {**base, "is_causal": None}))  # transformers counts it as false


APPLIED_VALUES: dict[str, Any] = {
    **{"dtype": "float16", "torch_dtype": "bfloat16", "num_hidden_layers": 5, "hidden_size": 128, "head_dim": 16},
    **{"intermediate_size": 32, "vocab_size": 999, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"max_position_embeddings": 64, "rms_norm_eps": 0.1, "rope_theta": 7e5, "eos_token_id": 7},
    **{"tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2}},
    **{"rope_parameters": {"rope_theta": 77.0}, "original_max_position_embeddings": 100},
    **{"attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 8},
    **{"max_window_layers": 1, "no_rope_layers": [0, 1, 1], "no_rope_layer_interval": 2, "clip_qkv": 3.0},
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), 0.1),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 7.0),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "use_bias", "attention_out_bias", "use_post_norm"), True),
    **dict.fromkeys(("qkv_bias", "bias"), True),
    **{"query_pre_attn_scalar": 77, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    **{"hidden_activation": "silu", "sliding_window_pattern": 2, "rope_local_base_freq": 77.0, "logit_scale": 3.0},
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 40),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_shared_experts"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "rotary_dim"), 32),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "n_group", "topk_group", "first_k_dense_replace"), 2),
    **{"mlp_only_layers": [1], "norm_topk_prob": True, "moe_norm_min": 0.1, "routed_scaling_factor": 3.0},
    **{"moe_num_shared_experts": 1, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    **{"swiglu_alpha": 3.0, "swiglu_limit": 3.0, "router_jitter_noise": 0.3, "lm_head_bias": True},
    **{"intermediate_size_mlp": 48, "moe_layers": [1], "interleave_moe_layer_step": 2, "floor_scale": 16},
    **{"attention_chunk_size": 16, "attn_temperature_tuning": True, "attn_scale": 0.5},
    "layer_rope_theta": [0, 1e4, 7e5],
    **{f"linear_{name}": 4 for name in ("num_key_heads", "key_head_dim", "value_head_dim")},
    **{"linear_num_value_heads": 64, "linear_conv_kernel_dim": 3, "full_attention_interval": 2},
    **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 3},
    **{"mamba_expand": 4, "mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": [0.5, math.inf]},
    **{"shared_intermediate_size": 48, "position_embedding_type": "rope", "attn_layer_indices": [2]},
    **{f"{name}_multiplier": 7.0 for name in ("lm_head", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")},
    **{"mlp_multipliers": [1.0, 2.0], "ssm_multipliers": [1.0, 1.0, 3.0, 1.0, 1.0], "mamba_d_ssm": 256},
    **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True},
    **{"num_dense_layers": 0, "use_expert_bias": False},
    **{"conv_L_cache": 4, "conv_bias": True, "tie_embedding": False, "full_attn_idxs": [2], "block_ff_dim": 48},
    **{"block_auto_adjust_ff_dim": False, "block_multiple_of": 32, "block_ffn_dim_multiplier": 9.0},
    "partial_rotary_factor": 0.75,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "compression_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}


OF_PHI3 = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
"""The only type that it has."""

NEEDED: dict[str, dict[str, Any]] = {
    "original_max_position_embeddings": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "rope_theta": {"rope_parameters": {"rope_type": "default"}},
    "use_sliding_window": {"max_window_layers": 1, "sliding_window": 9, "no_rope_layers": [1, 0, 1]},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1, "no_rope_layers": [1, 0, 1]},
    "max_window_layers": {"use_sliding_window": True},
    "intermediate_size": {"mlp_only_layers": [0], "first_k_dense_replace": 1, "block_auto_adjust_ff_dim": False},
    "block_ff_dim": {"block_auto_adjust_ff_dim": False},
    "mamba_expand": {"mamba_d_ssm": None},
    **{key: {"num_experts": 40} for key in ("moe_topk", "num_experts_per_tok")},
    "topk_group": {"n_group": 4},
    "attn_temperature_tuning": {"floor_scale": 16},
    "intermediate_size_mlp": {"moe_layers": [0]},
}
"""Without these keys, the key has no effect."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_applied_key_changes_what_is_read_and_the_others_change_nothing(family: str, tmp_path: Path) -> None:
    checked = {
        "model_type",
        "architectures",
        "hidden_act",
        "layer_types",
        "mamba_d_head",
    }  # one value each; see test_info
    base = base_of(family)
    for name, use in keys_of_family(FAMILIES[family]).items():
        uses = keys_of_family(FAMILIES[family])
        needed = NEEDED.get(name, {}) if use is Use.APPLIED else {}
        needed = {key: value for key, value in needed.items() if uses.get(key) is Use.APPLIED}
        if family == "phi3" and "rope_scaling" in needed:
            needed = {"rope_scaling": OF_PHI3}
        plain = read_model_info(write(tmp_path, {**base, **needed}))
        if use is Use.APPLIED and name not in checked:
            values = (False, True) if isinstance(APPLIED_VALUES[name], bool) else (APPLIED_VALUES[name],)
            if family == "phi3" and name == "rope_scaling":
                values = (OF_PHI3,)
            if name == "num_hidden_layers" and "layer_types" in base:
                needed = {"layer_types": ["full_attention"] * APPLIED_VALUES[name]}
            changed = [read_model_info(write(tmp_path, {**base, **needed, name: value})) for value in values]
            assert any(info != plain for info in changed), name
        if use is Use.NO_EFFECT:
            assert read_model_info(write(tmp_path, {**base, name: 3})) == plain, name


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": False}], ids=str)
def test_sampling_parameters_of_the_file_are_those_that_vllm_takes_from_it(
    do_sample: dict[str, bool], tmp_path: Path
) -> None:
    """As they are written, whatever do_sample says. transformers takes other values if that is off: it is greedy."""
    values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    write(tmp_path, {"model_type": "qwen2", **BASE}, {**do_sample, **values, "presence_penalty": 1.0})
    assert read_sampling_defaults(tmp_path) == SamplingParams(**values)  # type: ignore[arg-type]
    notes = ["generation_config.json: do_sample=False, which temperature=0 is here: left to each request"]
    assert notes_on_settings(tmp_path, applies_sampling=True) == (notes if do_sample == {"do_sample": False} else [])
    config = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in values} == values
    write(tmp_path, {"model_type": "qwen2", **BASE}, {**dict.fromkeys(values), "top_k": -1})
    assert read_sampling_defaults(tmp_path) == SamplingParams()
    write(tmp_path, {"model_type": "qwen2", **BASE}, {"top_k": 20.0, "temperature": 0})
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=0.0, top_k=20)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", 2.5, "a number from 0, at most 2, not 2.5"),
        ("temperature", -0.1, "a number from 0, at most 2, not -0.1"),
        ("temperature", "0.7", "a number from 0, at most 2, not '0.7'"),
        ("top_p", 0.0, "a number greater than 0, at most 1, not 0.0"),
        ("top_k", 20.5, "a whole number from -1, not 20.5"),
        ("top_k", True, "a whole number from -1, not True"),
        ("min_p", float("nan"), "a number from 0, at most 1, not nan"),
        ("repetition_penalty", float("inf"), "a number greater than 0, not inf"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(
    tmp_path: Path, name: str, value: Any, allowed: str
) -> None:
    write(tmp_path, {"model_type": "qwen2", **BASE}, {name: value})
    with pytest.raises(CheckpointError) as error:
        read_sampling_defaults(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'generation_config.json'}: {name} must be {allowed}; sampling_defaults=neutral leaves it out"
    )


def test_other_settings_are_named_where_sampling_parameters_apply(tmp_path: Path) -> None:
    sampled = {"do_sample": True, "temperature": 0.7, "typical_p": 0.9, "no_repeat_ngram_size": 3}
    write(tmp_path, {"model_type": "qwen2", **BASE}, sampled | {"general.sampling.xtc_probability": 0.5})
    assert notes_on_settings(tmp_path, applies_sampling=True) == [
        "generation_config.json: typical_p=0.9, no_repeat_ngram_size=3, general.sampling.xtc_probability=0.5: left to "
        "each request"
    ]


def test_generation_settings_that_requests_must_state_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "qwen2", **BASE}, {"do_sample": True, "temperature": 1.0, "eos_token_id": 2})
    assert notes_on_settings(tmp_path) == []
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "pad_token_id": 1}
    write(tmp_path, {"model_type": "qwen2", **BASE}, sampled)
    (line,) = notes_on_settings(tmp_path)
    assert "temperature=0.7, top_k=20, repetition_penalty=1.05: left to each request" in line
    write(tmp_path, {"model_type": "qwen2", **BASE}, {"top_k": 20, "suppress_tokens": [3]})
    assert notes_on_settings(tmp_path) == ["generation_config.json: suppress_tokens=[3]: left to each request"]


def test_a_theta_that_rope_scaling_replaces_is_one_line(tmp_path: Path) -> None:
    old = {"rope_type": "default", "rope_theta": 1e6}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    write(tmp_path, {"model_type": "qwen2", **BASE, "rope_parameters": old, "rope_scaling": scaling})
    (line,) = notes_on_settings(tmp_path)
    assert "rope_theta is 10000.0, not 1000000.0" in line
    scaling["rope_theta"] = 1e6
    write(tmp_path, {"model_type": "qwen2", **BASE, "rope_parameters": old, "rope_scaling": scaling})
    assert notes_on_settings(tmp_path) == []
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"] == scaling


def test_a_models_own_code_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", **BASE, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}})
    (line,) = notes_on_settings(tmp_path)
    assert line == "config.json: auto_map names Python code of the model, which is not run: it is computed as llama"
