"""Hunyuan's dense models: Llama's layer with norms of each head's query and key, after rotary embedding."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.json_files import json_object, positive_float
from tokasaurus.checkpoint.rope import RopeInfo
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, ModelSpec


def _hunyuan(config: Settings) -> ModelSpec:
    rope, norm = rope_of_hunyuan(config), config.norm()
    return config.model(LayerSpec(attention_of_hunyuan(config), config.mlp(), norm, norm), norm, rotary=(rope,))


def attention_of_hunyuan(config: Settings) -> AttentionSpec:
    """With norms after rotary embedding."""
    norm, bias = config.norm(), config.flag("attention_bias")
    return config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm, norms_after_rotary=True)


def rope_of_hunyuan(config: Settings) -> RopeInfo:
    """With the alpha of its own rotary scaling."""
    # The type "dynamic" with an alpha is a larger base, whatever the length of a sequence.
    alpha = 1.0
    for key in ("rope_parameters", "rope_scaling"):
        setting = json_object(config.fields, key)
        if setting.get("rope_type", setting.get("type")) == "dynamic" and setting.get("alpha"):
            alpha = positive_float(setting, "alpha", 1e9)
            config.fields[key] = {**setting, "rope_type": "default", "type": "default"}
    return replace(config.rope, theta=config.rope.theta * alpha ** (config.head_dim / (config.head_dim - 2)))


FAMILIES = {
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        _hunyuan,
        applied=("attention_bias",),
        without_effect=("eod_token_id",),
        defaults={"rms_norm_eps": 1e-5},
        stored=StoredTensors(
            {f"self_attn.{short}_norm": f"self_attn.{name}_layernorm" for short, name in (("q", "query"), ("k", "key"))}
        ),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("hunyuan-dense"),
    ),
}
