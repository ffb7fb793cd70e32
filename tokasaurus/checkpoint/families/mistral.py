"""Mistral's families: Llama's layer with a window in some checkpoints; Ministral 3 scales queries by position."""

from dataclasses import replace

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings
from tokasaurus.checkpoint.json_files import positive_float, positive_int
from tokasaurus.checkpoint.rope import MAX_CONTEXT, rope_setting
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _mistral(config: Settings) -> ModelSpec:
    norm = config.norm()
    return config.model(LayerSpec(config.attention(window=config.window), config.mlp(), norm, norm), norm)


def _ministral(config: Settings) -> ModelSpec:
    norm, attention = config.norm(), config.attention()
    windows = config.windows(lambda _: config.fields.get("sliding_window") is not None)
    layers = [LayerSpec(replace(attention, window=window), config.mlp(), norm, norm) for window in windows]
    return config.model(layers, norm)


def _ministral3(config: Settings) -> ModelSpec:
    plain, setting = _mistral(config), rope_setting(config.fields)
    if not setting.get("llama_4_scaling_beta"):
        return plain
    scale = positive_float(setting, "llama_4_scaling_beta", 1e3)
    original = positive_int(setting, "original_max_position_embeddings", MAX_CONTEXT)
    of_queries = replace(config.rope, position_scale=scale, original_context_length=original)
    layers = [replace(layer, attention=replace(layer.own_attention, query_rotary=1)) for layer in plain.layers]
    return replace(plain, layers=tuple(layers), rotary=(config.rope, of_queries))


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
    "ministral3": Family(
        "Ministral3ForCausalLM",
        _ministral3,
        applied=("sliding_window",),
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
        is_kv_heads_optional=True,
        gguf=GGUFFiles("mistral3", is_permuted=True, fields={"llama_4_scaling_beta": None}),
        with_images=("mistral3", "Mistral3ForConditionalGeneration"),
    ),
}
