"""OLMo: norms without weights; from OLMo 2 on, norms of what attention and MLP give, not of what they take."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec, NormSpec


def _olmo(config: Settings) -> ModelSpec:
    norm, bias = NormSpec(1e-5, kind="layer", has_weight=False), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, clip=config.optional("clip_qkv"))
    return config.model(LayerSpec(attention, config.mlp(), norm, norm), norm)


def _olmo2(config: Settings) -> ModelSpec:
    return config.model(_late_norms(config), config.norm())


def _late_norms(config: Settings) -> LayerSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm, norm_over="width")
    return LayerSpec(attention, config.mlp(), None, None, attention_out_norm=norm, mlp_out_norm=norm)


def _olmo3(config: Settings) -> ModelSpec:
    plain = _late_norms(config)
    layers = [
        replace(plain, attention=replace(plain.own_attention, window=window, rotary=0 if window is None else 1))
        for window in config.windows(lambda index: (index + 1) % 4 != 0)
    ]
    return config.model(layers, config.norm(), rotary=config.rotary_by_type("rope_theta"))


_LATE_NORMS = StoredTensors(
    {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
)

FAMILIES = {
    "olmo": Family(
        "OlmoForCausalLM",
        _olmo,
        applied=("attention_bias", "clip_qkv"),
        without_effect=("rms_norm_eps",),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("olmo", is_permuted=True, ignored=("attention.layer_norm_epsilon",)),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _olmo2,
        applied=("attention_bias",),
        without_effect=("clip_qkv",),
        defaults={"rms_norm_eps": 1e-5},
        stored=_LATE_NORMS,
        is_kv_heads_optional=True,
        gguf=GGUFFiles("olmo2"),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _olmo3,
        applied=("attention_bias", "sliding_window"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        stored=_LATE_NORMS,
        is_kv_heads_optional=True,
        gguf=GGUFFiles("olmo2", needed=("attention.sliding_window",)),
    ),
}
