"""Command R: attention and MLP side by side, LayerNorm without bias, scaled logits."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _cohere(config: Settings) -> ModelSpec:
    norm, bias = config.norm("layer_norm_eps", kind="layer", in_float32=True), config.flag("attention_bias")
    own = norm if config.flag("use_qk_norm") else None
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=own, norm_by_head=own is not None)
    layer = LayerSpec(attention, config.mlp(), norm, None, is_parallel=True)
    return config.model(layer, norm, logit_scale=config.number("logit_scale"))


def _cohere2(config: Settings) -> ModelSpec:
    norm, bias = config.norm("layer_norm_eps", kind="layer", in_float32=True), config.flag("attention_bias")
    pattern = config.count("sliding_window_pattern")
    layers = [
        LayerSpec(
            config.attention(window=window, rotary=None if window is None else 0, has_qkv_bias=bias, has_out_bias=bias),
            config.mlp(),
            *(norm, None),
            is_parallel=True,
        )
        for window in config.windows(lambda index: (index + 1) % pattern != 0)
    ]
    return config.model(layers, norm, logit_scale=config.number("logit_scale"))


_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}

FAMILIES = {
    "cohere": Family(
        "CohereForCausalLM",
        _cohere,
        applied=("layer_norm_eps", "logit_scale", "attention_bias", "use_qk_norm"),
        without_effect=("rms_norm_eps",),
        defaults={**_DEFAULTS, "rope_theta": 5e5},
        stored=StoredTensors(is_interleaved=True, norms_by_head=True),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("command-r"),
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _cohere2,
        applied=("layer_norm_eps", "logit_scale", "attention_bias", "sliding_window", "sliding_window_pattern"),
        without_effect=("rms_norm_eps", "head_dim"),
        defaults={**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
        stored=StoredTensors(is_interleaved=True),
        is_kv_heads_optional=True,
        ignores_head_dim=True,
        gguf=GGUFFiles("cohere2"),
    ),
}
