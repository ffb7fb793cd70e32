"""Granite: Llama's layer with multipliers; Granite SWA has windows and sinks, and a rotary base for each layer."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelSpec


def _granite(config: Settings) -> ModelSpec:
    return config.model(layer_of_granite(config, _mlp(config)), config.norm(), **scales_of_granite(config))


def _granite_swa(config: Settings) -> ModelSpec:
    plain, thetas = layer_of_granite(config, _mlp(config), has_sinks=True), config.fields.get("layer_rope_theta")
    thetas = [config.rope.theta] * config.num_layers if thetas is None else thetas
    if not isinstance(thetas, list) or any(type(theta) not in (int, float) for theta in thetas):
        raise CheckpointError(f"layer_rope_theta must be a list of numbers, not {thetas!r}")
    if len(thetas) != config.num_layers or any(theta <= 1 and theta != 0 for theta in thetas):
        raise CheckpointError(f"layer_rope_theta {thetas!r} must have {config.num_layers} numbers, 0 or greater than 1")
    bases = sorted({theta for theta in thetas if theta})
    rotary = tuple(replace(config.rope, theta=float(theta)) for theta in bases)
    windows = config.windows(lambda index: index % 4 != 0)
    layers = [
        replace(
            plain, attention=replace(plain.own_attention, window=window, rotary=bases.index(theta) if theta else None)
        )
        for window, theta in zip(windows, thetas, strict=True)
    ]
    return config.model(layers, config.norm(), rotary=rotary or (config.rope,), **scales_of_granite(config))


def layer_of_granite(config: Settings, mlp: MLPSpec | ExpertsSpec, has_sinks: bool = False) -> LayerSpec:
    """With the multipliers of scores and residuals."""
    norm, bias, scale = config.norm(), config.flag("attention_bias"), config.number("attention_multiplier")
    attention = config.attention(scale=scale, has_qkv_bias=bias, has_out_bias=bias, has_sinks=has_sinks)
    return LayerSpec(attention, mlp, norm, norm, residual_multiplier=config.number("residual_multiplier"))


def _mlp(config: Settings) -> MLPSpec:
    return config.mlp(has_bias=config.flag("mlp_bias"))


def scales_of_granite(config: Settings) -> dict[str, float]:
    """Fields of ModelSpec."""
    embedding_scale, logits_scaling = config.number("embedding_multiplier"), config.number("logits_scaling")
    return {"embedding_scale": embedding_scale, "logit_scale": 1 / logits_scaling}


MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
"""Keys."""

FAMILIES = {
    "granite": Family(
        "GraniteForCausalLM",
        _granite,
        applied=("attention_bias", "mlp_bias", *MULTIPLIERS),
        defaults=dict.fromkeys(MULTIPLIERS, 1.0),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("granite", is_permuted=True),
    ),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        _granite_swa,
        applied=("attention_bias", "mlp_bias", "sliding_window", "layer_rope_theta", *MULTIPLIERS),
        defaults={
            **dict.fromkeys(MULTIPLIERS, 1.0),
            **{"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True},
        },
        is_kv_heads_optional=True,
    ),
}
