"""Phi 1 and 2: attention and MLP side by side. Phi 3 and 4: Llama's layer, with fused tensors and partial rotary."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.json_files import json_object
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _phi(config: Settings) -> ModelSpec:
    norm = config.norm("layer_norm_eps", kind="layer", has_bias=True)
    own = norm if config.flag("qk_layernorm") else None
    layer = LayerSpec(
        config.attention(has_qkv_bias=True, has_out_bias=True, query_key_norm=own),
        config.mlp(is_gated=False, has_bias=True),
        norm,
        None,
        is_parallel=True,
    )
    return config.model(layer, norm, has_head_bias=True)


def _phi3(config: Settings) -> ModelSpec:
    norm, types = config.norm(), ("rope_scaling", "rope_parameters")
    for key in types:  # older files call it by other names
        setting = json_object(config.fields, key)
        if setting.get("rope_type", setting.get("type")) in ("su", "yarn"):
            config.fields[key] = {**setting, "rope_type": "longrope"}
    return config.model(LayerSpec(config.attention(window=config.window), config.mlp(), norm, norm), norm)


FAMILIES = {
    "phi": Family(
        "PhiForCausalLM",
        _phi,
        applied=("layer_norm_eps", "qk_layernorm"),
        without_effect=("rms_norm_eps", "resid_pdrop", "embd_pdrop"),
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        stored=StoredTensors(
            {
                **{"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
                **{f"self_attn.{each}_norm": f"self_attn.{each}_layernorm" for each in "qk"},
                "model.norm": "model.final_layernorm",
            }
        ),
        is_kv_heads_optional=True,
        has_partial_rotary=True,
        gguf=GGUFFiles("phi2"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _phi3,
        applied=("sliding_window",),
        without_effect=("resid_pdrop", "embd_pdrop"),
        defaults={"rms_norm_eps": 1e-5},
        stored=StoredTensors(
            fused={
                "self_attn.qkv_proj": [f"self_attn.{each}_proj" for each in "qkv"],
                "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            }
        ),
        is_kv_heads_optional=True,
        has_partial_rotary=True,
        gguf=GGUFFiles("phi3"),
    ),
}
