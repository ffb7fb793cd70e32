"""Granite: Llama's layer with multipliers."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _granite(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    layer = LayerSpec(
        config.attention(scale=config.number("attention_multiplier"), has_qkv_bias=bias, has_out_bias=bias),
        config.mlp(has_bias=config.flag("mlp_bias")),
        norm,
        norm,
        residual_multiplier=config.number("residual_multiplier"),
    )
    scales = {
        "embedding_scale": config.number("embedding_multiplier"),
        "logit_scale": 1 / config.number("logits_scaling"),
    }
    return config.model(layer, norm, **scales)


_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

FAMILIES = {
    "granite": Family(
        "GraniteForCausalLM",
        _granite,
        applied=("attention_bias", "mlp_bias", *_MULTIPLIERS),
        defaults=dict.fromkeys(_MULTIPLIERS, 1.0),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("granite", is_permuted=True),
    ),
}
