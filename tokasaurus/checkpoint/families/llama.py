"""Llama's layer, and the families that differ from it by biases, norms of queries and keys, windows and rotary."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, ModelSpec


def _llama(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    return config.model(LayerSpec(attention, config.mlp(has_bias=config.flag("mlp_bias")), norm, norm), norm)


def _qwen2(config: Settings) -> ModelSpec:
    return _with_windows(config, config.attention(has_qkv_bias=True))


def _qwen3(config: Settings) -> ModelSpec:
    bias = config.flag("attention_bias")
    return _with_windows(config, config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=config.norm()))


def _with_windows(config: Settings, attention: AttentionSpec) -> ModelSpec:
    norm, has_windows = config.norm(), config.flag("use_sliding_window")
    first = config.count("max_window_layers")
    windows = config.windows(lambda index: index >= first) if has_windows else config.no_windows()
    layers = [LayerSpec(replace(attention, window=window), config.mlp(), norm, norm) for window in windows]
    return config.model(layers, norm)


_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES = {
    # Llama 3.x, and models of the same architecture such as SmolLM2
    "llama": Family(
        "LlamaForCausalLM",
        _llama,
        applied=("attention_bias", "mlp_bias"),
        refused=("sliding_window",),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("llama", is_permuted=True),
    ),
    # Qwen 2 and 2.5
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _qwen2,
        applied=("use_sliding_window", "sliding_window", "max_window_layers"),
        defaults=_QWEN_WINDOWS,
        gguf=GGUFFiles("qwen2"),
    ),
    # Qwen 3, the dense models
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        applied=("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
        defaults={**_QWEN_WINDOWS, "head_dim": 128},
        gguf=GGUFFiles("qwen3"),
    ),
}
