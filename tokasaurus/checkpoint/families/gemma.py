"""Gemma: norms by 1 + weight, scaled embeddings, gelu; Gemma 2 caps scores and logits, 3 norms queries and keys."""

from typing import Any

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.rope import RopeInfo
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _gemma(config: Settings) -> ModelSpec:
    norm, bias = config.norm(in_float32=True), config.flag("attention_bias")
    mlp = config.mlp(activation="gelu_tanh") if config.fields.get("hidden_act") == "gelu" else config.mlp()
    layer = LayerSpec(config.attention(has_qkv_bias=bias, has_out_bias=bias), mlp, norm, norm)
    return config.model(layer, norm, embedding_scale=config.hidden_size**0.5)


def _gemma2(config: Settings) -> ModelSpec:
    return _four_norms(config, 2, softcap=config.optional("attn_logit_softcapping"))


def _gemma3(config: Settings) -> ModelSpec:
    pattern = config.count("sliding_window_pattern")
    norm, rotary = config.norm(in_float32=True), config.rotary_by_type("rope_local_base_freq")
    return _four_norms(config, pattern, query_key_norm=norm, rotary_tables=rotary)


def _four_norms(
    config: Settings, pattern: int, rotary_tables: tuple[RopeInfo, ...] = (), **attention: Any
) -> ModelSpec:
    """pattern: each so many layers, one sees all tokens; the others have a window."""
    norm, bias = config.norm(in_float32=True), config.flag("attention_bias")
    scale = config.number("query_pre_attn_scalar") ** -0.5
    layers = [
        LayerSpec(
            config.attention(
                scale=scale,
                window=window,
                rotary=1 if window is not None and rotary_tables else 0,
                has_qkv_bias=bias,
                has_out_bias=bias,
                **attention,
            ),
            config.mlp("hidden_activation"),
            *(norm, norm, norm, norm),
        )
        for window in config.windows(lambda index: (index + 1) % pattern != 0)
    ]
    return config.model(
        layers,
        norm,
        rotary=rotary_tables or (config.rope,),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.optional("final_logit_softcapping"),
    )


_FOUR_NORMS = StoredTensors(
    {
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    adds_one=True,
)
_ACTIVATION = "gelu_pytorch_tanh"
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_LATER_DEFAULTS = {**_DEFAULTS, "hidden_activation": _ACTIVATION, "query_pre_attn_scalar": 256, "sliding_window": 4096}

FAMILIES = {
    "gemma": Family(
        "GemmaForCausalLM",
        _gemma,
        applied=("attention_bias",),
        refused=("use_bidirectional_attention",),
        defaults={**_DEFAULTS, "hidden_act": _ACTIVATION},
        stored=StoredTensors(adds_one=True),
        gguf=GGUFFiles("gemma"),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _gemma2,
        applied=(
            *("attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        refused=("use_bidirectional_attention",),
        without_effect=("hidden_act",),
        defaults={**_LATER_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        stored=_FOUR_NORMS,
        gguf=GGUFFiles("gemma2", fields={"sliding_window": 4096}),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        applied=(
            *("attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window"),
            *("final_logit_softcapping", "sliding_window_pattern", "rope_local_base_freq"),
        ),
        refused=("use_bidirectional_attention",),
        without_effect=("hidden_act", "attn_logit_softcapping"),
        defaults={
            **{**_LATER_DEFAULTS, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            # text_config has only what differs from these.
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
            "max_position_embeddings": 131_072,
        },
        stored=_FOUR_NORMS,
        with_images=("gemma3", "Gemma3ForConditionalGeneration"),
        gguf=GGUFFiles("gemma3"),
    ),
}
