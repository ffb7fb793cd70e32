"""GLM: half of each head is rotated, adjacent channels together; GLM 4 has four norms a layer."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, ModelSpec


def _glm(config: Settings) -> ModelSpec:
    norm = config.norm()
    return config.model(LayerSpec(_attention(config), config.mlp(), norm, norm), norm)


def _glm4(config: Settings) -> ModelSpec:
    norm = config.norm()
    return config.model(LayerSpec(_attention(config), config.mlp(), norm, norm, norm, norm), norm)


def _attention(config: Settings) -> AttentionSpec:
    return config.attention(has_qkv_bias=config.flag("attention_bias"))


_FUSED = {"mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}
_DEFAULTS = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}

FAMILIES = {
    "glm": Family(
        "GlmForCausalLM",
        _glm,
        applied=("attention_bias",),
        defaults=_DEFAULTS,
        stored=StoredTensors(fused=_FUSED, is_interleaved=True),
        has_partial_rotary=True,
        gguf=GGUFFiles("chatglm"),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _glm4,
        applied=("attention_bias",),
        defaults=_DEFAULTS,
        stored=StoredTensors(
            {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"},
            fused=_FUSED,
            is_interleaved=True,
        ),
        has_partial_rotary=True,
        gguf=GGUFFiles("glm4"),
    ),
}
