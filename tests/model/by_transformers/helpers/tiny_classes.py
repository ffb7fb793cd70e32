"""Small random models of transformers' causal language models, by model_type."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 272
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 96, "ffn_hidden_size": 96},
    **{"d_model": 64, "n_layers": 4, "n_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "rotary_dim": 8},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 24, "max_seq_len": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "sep_token_id": 2},
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global"], 4]], "num_heads": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "lfm2": {"layer_types": ["full_attention"] * 4},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "zaya": {"num_experts_per_tok": 1},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
}
"""Beyond the sizes, by family."""


def tiny_config(family: str) -> PreTrainedConfig:
    default = AutoConfig.for_model(family)
    fields = default.to_dict()
    sizes = {name: size for name, size in _SIZES.items() if name in fields or _can_be_set(default, name)}
    if "kv_lora_rank" in fields:  # each head has keys of its own there
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "is_decoder" in fields:
        sizes["is_decoder"] = True
    return AutoConfig.for_model(family, **{**sizes, **_OWN.get(family, {})})


def _can_be_set(config: PreTrainedConfig, name: str) -> bool:
    found = getattr(type(config), name, None)
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def save_tiny_model(directory: Path, config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Saved with random weights of a size that makes attention, routers and gates matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    return model
