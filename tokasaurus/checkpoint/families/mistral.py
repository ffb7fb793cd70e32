"""Mistral's families: Llama's layer with a window in some checkpoints."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, Settings
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _mistral(config: Settings) -> ModelSpec:
    norm = config.norm()
    return config.model(LayerSpec(config.attention(window=config.window), config.mlp(), norm, norm), norm)


def _ministral(config: Settings) -> ModelSpec:
    norm, attention = config.norm(), config.attention()
    windows = config.windows(lambda _: config.fields.get("sliding_window") is not None)
    layers = [LayerSpec(replace(attention, window=window), config.mlp(), norm, norm) for window in windows]
    return config.model(layers, norm)


_WINDOW = {"sliding_window": 4096}

FAMILIES = {
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        applied=("sliding_window",),
        defaults=_WINDOW,
        with_images=("mistral3", "Mistral3ForConditionalGeneration"),
    ),
    "ministral": Family("MinistralForCausalLM", _ministral, applied=("sliding_window",), defaults=_WINDOW),
}
