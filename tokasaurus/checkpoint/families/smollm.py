"""SmolLM3: Llama's layer, without rotary embedding in each fourth layer."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _smollm3(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    interval, listed = config.count("no_rope_layer_interval"), config.fields.get("no_rope_layers")
    if interval < 1:
        raise CheckpointError("no_rope_layer_interval must be at least 1")
    rotated = [bool((index + 1) % interval) for index in range(config.num_layers)] if listed is None else listed
    if not isinstance(rotated, list) or len(rotated) < config.num_layers or any(each not in (0, 1) for each in rotated):
        raise CheckpointError(f"no_rope_layers {rotated!r} must have 0 or 1 for each of {config.num_layers} layers")
    has_windows = config.flag("use_sliding_window") and config.fields.get("sliding_window") is not None
    windows = config.windows(lambda index: not rotated[index]) if has_windows else config.no_windows()
    layers = [
        LayerSpec(
            config.attention(window=window, rotary=0 if is_rotated else None, has_qkv_bias=bias, has_out_bias=bias),
            config.mlp(has_bias=config.flag("mlp_bias")),
            norm,
            norm,
        )
        for window, is_rotated in zip(windows, rotated, strict=False)
    ]
    return config.model(layers, norm)


FAMILIES = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        applied=(
            *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
            *("use_sliding_window", "sliding_window"),
        ),
        defaults={"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        gguf=GGUFFiles("smollm3", is_permuted=True),
    ),
}
