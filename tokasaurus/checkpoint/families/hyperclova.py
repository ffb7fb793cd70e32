"""HyperCLOVA X: Llama's layer with multipliers, and norms of what attention and MLP give too."""

from tokasaurus.checkpoint.families.family import Family, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _hyperclovax(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    out_norm = norm if config.flag("use_post_norm") else None
    scale = config.number("attention_multiplier", config.head_dim**-0.5)
    layer = LayerSpec(
        config.attention(scale=scale, has_qkv_bias=bias, has_out_bias=bias),
        config.mlp(has_bias=config.flag("mlp_bias")),
        *(norm, norm, out_norm, out_norm),
        residual_multiplier=config.number("residual_multiplier"),
    )
    embedding_scale, logit_scale = config.number("embedding_multiplier"), config.number("logits_scaling")
    return config.model(layer, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)


_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")

FAMILIES = {
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        _hyperclovax,
        applied=("attention_bias", "mlp_bias", "use_post_norm", "attention_multiplier", *_MULTIPLIERS),
        defaults={**dict.fromkeys(_MULTIPLIERS, 1.0), "use_post_norm": True},
        stored=StoredTensors({"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}),
        is_kv_heads_optional=True,
    ),
}
