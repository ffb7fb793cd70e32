"""EXAONE 4: norms of what attention and MLP give, and windows; layers that see all tokens have no rotary embedding."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _exaone4(config: Settings) -> ModelSpec:
    norm, has_windows = config.norm(), config.fields.get("sliding_window") is not None
    pattern = config.count("sliding_window_pattern")
    windows = config.windows(lambda index: (index + 1) % pattern != 0) if has_windows else config.no_windows()
    layers = [
        LayerSpec(
            config.attention(window=window, query_key_norm=norm, rotary=None if has_windows and window is None else 0),
            config.mlp(),
            *(None, None, norm, norm),
        )
        for window in windows
    ]
    return config.model(layers, norm)


FAMILIES = {
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _exaone4,
        applied=("sliding_window", "sliding_window_pattern"),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        stored=StoredTensors(
            {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
        ),
        gguf=GGUFFiles("exaone4"),
    ),
}
