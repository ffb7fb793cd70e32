"""Families that are Llama's but for biases and the order of rotated channels: ERNIE 4.5, Helium, InternLM 3, Seed-OSS,
and CWM with windows."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _layer(config: Settings, qkv: str, out: str | None, mlp: str) -> LayerSpec:
    """qkv, out, mlp: the keys that say whether there are biases."""
    norm = config.norm()
    attention = config.attention(has_qkv_bias=config.flag(qkv), has_out_bias=out is not None and config.flag(out))
    return LayerSpec(attention, config.mlp(has_bias=config.flag(mlp)), norm, norm)


def _ernie(config: Settings) -> ModelSpec:
    return config.model(_layer(config, "use_bias", "use_bias", "use_bias"), config.norm())


def _helium(config: Settings) -> ModelSpec:
    return config.model(_layer(config, "attention_bias", None, "mlp_bias"), config.norm())


def _internlm3(config: Settings) -> ModelSpec:
    norm, qkv_bias = config.norm(), config.flag("attention_bias") or config.flag("qkv_bias")
    bias = config.flag("mlp_bias") or config.flag("bias")
    attention = config.attention(has_qkv_bias=qkv_bias, has_out_bias=bias)
    return config.model(LayerSpec(attention, config.mlp(has_bias=bias), norm, norm), norm)


def _seed_oss(config: Settings) -> ModelSpec:
    return config.model(_layer(config, "attention_bias", "attention_out_bias", "mlp_bias"), config.norm())


def _cwm(config: Settings) -> ModelSpec:
    norm = config.norm()
    layers = [
        LayerSpec(config.attention(window=window), config.mlp(), norm, norm)
        for window in config.windows(lambda index: index % 4 != 0)
    ]
    return config.model(layers, norm)


FAMILIES = {
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _ernie,
        applied=("use_bias",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "tie_word_embeddings": True},
        stored=StoredTensors(is_interleaved=True),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("ernie4_5"),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        _helium,
        applied=("attention_bias", "mlp_bias"),
        defaults={"rms_norm_eps": 1e-8, "head_dim": 128},
        stored=StoredTensors(is_interleaved=True),
    ),
    "internlm3": Family(
        "InternLM3ForCausalLM",
        _internlm3,
        applied=("attention_bias", "mlp_bias", "qkv_bias", "bias"),
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
        is_kv_heads_optional=True,
        other_architectures=("LlamaForCausalLM",),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _seed_oss,
        applied=("attention_bias", "attention_out_bias", "mlp_bias"),
        without_effect=("residual_dropout",),
        defaults={"attention_bias": True, "head_dim": 128},
        is_kv_heads_optional=True,
        gguf=GGUFFiles("seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
    "cwm": Family(
        "CwmForCausalLM",
        _cwm,
        applied=("sliding_window",),
        defaults={
            **{"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192},
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            },
        },
    ),
}
