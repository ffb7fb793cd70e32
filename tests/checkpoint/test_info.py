"""config.json as read here against the configuration classes of transformers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

from tests.checkpoint.helpers.configs import BASE, write
from tests.helpers.plain_info import plain_info, with_layers
from tokasaurus.checkpoint import CheckpointError, ModelInfo, RopeInfo, read_model_info
from tokasaurus.checkpoint.spec import NormSpec
from tokasaurus.messages.status import FlagRefused

LLAMA3_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def info_by_transformers(directory: Path) -> ModelInfo:
    config = AutoConfig.from_pretrained(directory)
    rope = config.rope_parameters
    scaled = rope["rope_type"] == "llama3"
    ends = config.eos_token_id
    info = plain_info(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope=RopeInfo(
            theta=rope["rope_theta"],
            scaling_type=rope["rope_type"],
            factor=rope["factor"] if scaled else 1.0,
            low_freq_factor=rope["low_freq_factor"] if scaled else 1.0,
            high_freq_factor=rope["high_freq_factor"] if scaled else 1.0,
            original_context_length=rope["original_max_position_embeddings"] if scaled else 0,
        ),
        tie_embeddings=config.tie_word_embeddings,
        eos_ids=tuple(ends) if isinstance(ends, list) else (ends,),
        dtype=str(config.dtype).removeprefix("torch."),
    )
    attention = info.spec.layers[0].attention
    if config.model_type == "qwen2":
        return with_layers(info, attention=replace(attention, has_qkv_bias=True))
    norm = NormSpec(config.rms_norm_eps) if config.model_type == "qwen3" else None
    return with_layers(info, attention=replace(attention, query_key_norm=norm))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "extra",
    [
        {"torch_dtype": "bfloat16", "rope_theta": 5e5},
        {"torch_dtype": "float16", "rope_theta": 5e5, "rope_scaling": None, "tie_word_embeddings": True},
        {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 32},
        {"dtype": "float32", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FIELDS}},
        {"dtype": "float32", "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3_FIELDS}},
        {"dtype": "float32", "rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
        {"dtype": "float32", "eos_token_id": [3, 7]},
    ],
)
def test_old_and_new_config_formats_are_read_as_transformers_reads_them(
    tmp_path: Path, family: str, extra: dict[str, Any]
) -> None:
    write(tmp_path, {"model_type": family, "eos_token_id": 2, **BASE, **extra})
    assert read_model_info(tmp_path) == info_by_transformers(tmp_path)


def test_llama_4_scout_is_read_as_it_is_published(tmp_path: Path) -> None:
    """With factors between which nothing is, and more positions than any other model has."""
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    fields = {
        **{"model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16},
        **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1},
        **{"max_position_embeddings": 10485760, "rope_theta": 500000.0, "num_experts_per_tok": 1},
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
    }
    write(tmp_path, fields)
    info = read_model_info(tmp_path)
    assert info.context_length == 10485760
    assert info.spec.rotary[0] == RopeInfo(500000.0, "llama3", 16.0, 1.0, 1.0, 8192)
    assert [layer.attention.chunk for layer in info.spec.layers] == [8192, 8192, 8192, None] * 12


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_config_saved_by_transformers_is_read_back(tmp_path: Path, config_class: type) -> None:
    config_class(**BASE, eos_token_id=5, dtype="float32").save_pretrained(tmp_path)
    assert read_model_info(tmp_path) == info_by_transformers(tmp_path)


def test_yarn_with_its_original_length_serves_longer_sequences(tmp_path: Path) -> None:
    for scaling, length in (
        ({"factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"factor": 4.0}, 512),  # max_position_embeddings may be the length after scaling
    ):
        write(tmp_path, {"model_type": "qwen2", **BASE, "rope_scaling": {"type": "yarn", **scaling}})
        assert read_model_info(tmp_path).context_length == length


@pytest.mark.parametrize(
    ("first", "second", "union"),
    [(2, [2, 9, 4], (2, 4, 9)), ([7], None, (7,)), (None, 3, (3,)), (None, None, ()), (0, 1, (0, 1))],
)
def test_eos_ids_are_the_union_of_both_files(
    tmp_path: Path, first: object, second: object, union: tuple[int, ...]
) -> None:
    write(tmp_path, {"model_type": "llama", **BASE, "eos_token_id": first}, {"eos_token_id": second})
    assert read_model_info(tmp_path).eos_ids == union


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("bert", {}, "model_type 'bert' is not supported: BertSelfAttention gives attention a mask"),
        ("bert_of_tomorrow", {}, "model_type 'bert_of_tomorrow' is not supported: transformers "),
        ("llama", {"attention_bias": "yes"}, "attention_bias"),
        ("llama", {"mlp_bias": 1}, "mlp_bias"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama", {"hidden_act": {"silu": 1}}, "hidden_act"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForQuestionAnswering"),
        ("llama", {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope type 'proportional'"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "factor is missing, which rope type 'dynamic' needs"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "short_factor must be a list"),
        ("qwen2", {"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope type 'mrope'"),
        ("llama", {"rope_scaling": {"rope_type": None, "factor": 4.0}}, "rope type None"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "factor is missing, which rope type 'yarn' needs"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing, which rope type 'linear' needs"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": None}}, "factor is missing"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor must be a positive number"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast must be a positive"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 0}}, "attention_factor"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}, "truncate must be true or false"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.25}}, "partial_rotary"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 3"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers must be a positive integer, at most 10000, not '3'"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"hidden_size": 0}, "hidden_size"),
        ("llama", {"hidden_size": 10**30}, "hidden_size"),
        ("llama", {"num_attention_heads": -8}, "num_attention_heads"),
        ("llama", {"head_dim": 2**40}, "head_dim"),
        ("llama", {"vocab_size": 2**40}, "vocab_size"),
        ("llama", {"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta"),
        ("llama", {"rope_theta": 1e-30}, "rope_theta"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ("llama", {"rope_scaling": {"rope_type": ["llama3"]}}, "rope type"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": "all"}}, "partial_rotary_factor"),
        ("llama", {"layer_types": [["full_attention"]]}, "layer_types"),
        ("llama", {"quantization_config": "awq"}, "awq"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ("llama\x1b[2J", {}, "model_type"),
        ("llama", {"eos_token_id": 1000}, "eos_token_id 1000"),
        ("llama", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(
    tmp_path: Path, family: str, extra: dict[str, Any], message: str
) -> None:
    write(tmp_path, {"model_type": family, **BASE, **extra})
    with pytest.raises(CheckpointError) as caught:
        read_model_info(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json does not contain a JSON object"):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' changes with each sequence's length"),
        ({"rope_type": "proportional", "factor": 2.0}, "rope type 'proportional' is not supported, only "),
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast is not a setting of rope type 'linear'"),
        ({"rope_type": "yarn", "facter": 2}, "facter is not a setting of rope type 'yarn'"),
        ({"factor": 8}, "factor is not a setting of rope type 'default'"),
        ({"rope_type": "linear", "factor": 1e-9}, "factor 1e-09 of 512 tokens leaves no context"),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor is missing"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "rope_theta must be greater than 1"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ],
)
def test_a_wrong_rope_scaling_flag_is_refused_by_name(scaling: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "qwen2", **BASE})
    with pytest.raises(FlagRefused, match=re.escape(reason)) as caught:
        read_model_info(tmp_path, scaling)
    assert str(caught.value).startswith('rope_scaling={"')


def test_rope_scaling_makes_a_checkpoint_of_a_refused_type_readable(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "qwen2", **BASE, "rope_scaling": {"type": "proportional", "factor": 2.0}})
    info = read_model_info(tmp_path, {"rope_type": "linear", "factor": 2})
    assert (info.spec.rotary[0], info.context_length) == (RopeInfo(1e4, "linear", factor=2.0), 1024)


def test_a_line_says_that_short_sequences_have_the_long_factors_of_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128, **factors}
    write(tmp_path, {"model_type": "phi3", **BASE, "rope_scaling": scaling})
    info = read_model_info(tmp_path)
    assert "max_num_tokens_per_request=128 takes the short factors" in str(
        info.spec.rotary[0].note(info.context_length)
    )
    assert info.spec.rotary[0].note(128) is None
    assert RopeInfo(1e4).note(info.context_length) is None
