"""Small random-weight checkpoints in Hugging Face format, made by transformers, with a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ["llama", "qwen2", "qwen3"]
ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose norms scale by 1 + weight."""
VOCAB_SIZE = 272
EOS_ID = 256
SPECIAL_TOKENS = ["<|eos|>", "<|start|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


_YARN_SIZES = {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.2}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4},
    **{"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LINEAR = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "num_hidden_layers": 4},
}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_expand": 2, "num_hidden_layers": 4},
    "mamba_chunk_size": 16,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_CONVOLVED = ["conv", "full_attention", "conv", "full_attention"]
_SIGMOID = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
    "first_k_dense_replace": 0,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True, "mlp_bias": True}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}],
    "qwen3": [{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "attention_bias": True}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 11, "head_dim": 32}],
    "ministral": [
        {
            "head_dim": 16,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    ],
    "ministral3": [
        {
            "head_dim": 16,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
            },
        },
        {
            **{"head_dim": 32, "sliding_window": 11},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 16},
                "llama_4_scaling_beta": 0.2,
            },
        },
    ],
    "smollm3": [
        {"num_hidden_layers": 4},
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 10, "attention_bias": True},
    ],
    "olmo": [{}, {"clip_qkv": 1.5, "attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [
        {"num_hidden_layers": 4, "sliding_window": 10},
        {
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **_YARN_SIZES},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ],
    "gemma": [{"head_dim": 32}],
    "gemma2": [
        {"head_dim": 32, "sliding_window": 10, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
        {"head_dim": 16, "sliding_window": 5, "final_logit_softcapping": 2.0},
    ],
    "gemma3_text": [
        {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
    "phi": [{}, {"qk_layernorm": True, "num_key_value_heads": 4}],
    "phi3": [
        {},
        {"max_position_embeddings": 256, "original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
        {"sliding_window": 11, "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.75}},
    ],
    "granite": [
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 3.0},
        {"attention_bias": True, "mlp_bias": True},
    ],
    "granite_swa": [
        {"num_hidden_layers": 4, "sliding_window": 9, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "layer_rope_theta": [0, 1e4, 5e5],
            "attention_bias": True,
            "mlp_bias": True,
        },
    ],
    "glm": [{"head_dim": 32}],
    "glm4": [{"head_dim": 16, "attention_bias": False}, {"head_dim": 16}],
    "exaone4": [
        {"num_hidden_layers": 4, "sliding_window": 9},
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ],
    "cohere": [{}, {"use_qk_norm": True, "attention_bias": True}],
    "cohere2": [{"num_hidden_layers": 4, "sliding_window": 9}],
    "starcoder2": [{}, {"sliding_window": 9, "use_bias": False, "hidden_act": "gelu"}],
    "nemotron": [{}, {"attention_bias": True, "mlp_bias": True}],
    "jais2": [{}, {"attention_bias": False, "mlp_bias": False}],
    "hyperclovax": [
        {"embedding_multiplier": 9.0, "logits_scaling": 0.3, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
        {"use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    ],
    "hunyuan_v1_dense": [
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4, "factor": 1.0}},
        {"head_dim": 32, "attention_bias": True},
    ],
    "arcee": [{}, {"attention_bias": True, "mlp_bias": True}],
    "apertus": [{}, {"attention_bias": True, "hidden_act": "relu2"}],
    "internlm3": [
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e5}},
        {"head_dim": 32, "qkv_bias": True, "bias": True},
    ],
    "ernie4_5": [{"head_dim": 32}, {"use_bias": True, "head_dim": 16}],
    "helium": [{"head_dim": 16, "attention_bias": True}],
    "seed_oss": [{"head_dim": 32}, {"attention_out_bias": True, "mlp_bias": True, "head_dim": 16}],
    "qwen2_moe": [
        {**_EXPERTS, "shared_expert_intermediate_size": 64, "sliding_window": 9},
        {
            **{**_EXPERTS, "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
            **{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "qkv_bias": False},
        },
    ],
    "qwen3_moe": [
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
        {
            **{**_EXPERTS, "head_dim": 32, "decoder_sparse_step": 2, "attention_bias": True},
            **{"use_sliding_window": True, "sliding_window": 9},
        },
    ],
    "mixtral": [{"num_local_experts": 6}, {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9}],
    "phimoe": [
        {"num_local_experts": 8, "router_jitter_noise": 0.2},
        {
            **{"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9},
            "rope_parameters": {
                **{**LONGROPE, "original_max_position_embeddings": 16, "short_mscale": 1.3, "long_mscale": 1.3},
            },
        },
    ],
    "olmoe": [
        {"num_experts": 9, "num_experts_per_tok": 4},
        {"num_experts": 9, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ],
    "granitemoe": [
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 3.0},
        {"attention_bias": True, "num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.25},
    ],
    "ernie4_5_moe": [
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32},
        {
            **{"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 0},
            **{"use_bias": True, "moe_layer_interval": 2, "moe_layer_start_index": 0},
        },
    ],
    "hunyuan_v1_moe": [
        {
            **{"head_dim": 16, "num_experts": 8, "moe_topk": 3},
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4, "factor": 1.0},
        },
        {"head_dim": 32, "attention_bias": True, "num_experts": 4, "moe_topk": [2, 2, 2]},
    ],
    "glm4_moe": [
        {**_SIGMOID, "head_dim": 16, "use_qk_norm": True, "n_group": 4, "topk_group": 2},
        {**_SIGMOID, "head_dim": 32, "attention_bias": True, "first_k_dense_replace": 2, "norm_topk_prob": False},
    ],
    "dots1": [
        {**_SIGMOID, "head_dim": 16, "sliding_window": 9, "max_window_layers": 1, "n_shared_experts": 2},
        {
            **{**_SIGMOID, "head_dim": 32, "attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
            **{"norm_topk_prob": True, "n_group": 2, "topk_group": 1, "sliding_window": None},
        },
    ],
    "minimax_m2": [
        {
            **{"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.5},
        }
    ],
    "gpt_oss": [
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9},
        {
            **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
            **{"attention_bias": False, "swiglu_limit": 1.5, "swiglu_alpha": 0.7, "num_hidden_layers": 4},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ],
    "llama4_text": [
        {
            **{"head_dim": 16, "num_local_experts": 8, "intermediate_size_mlp": 64, "num_hidden_layers": 4},
            **{"attention_chunk_size": 13, "floor_scale": 7, "attn_scale": 0.8},
        },
        {
            **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 128},
            **{"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True},
            **{"no_rope_layers": [0, 1, 1], "attention_chunk_size": None, "attn_temperature_tuning": False},
        },
    ],
    "qwen3_next": [
        {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64},
        {
            **{**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
            **{"head_dim": 32, "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ],
    "qwen3_5_text": [_LINEAR, {**_LINEAR, "linear_num_key_heads": 4, "attention_bias": True}],
    "qwen3_5_moe_text": [{**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64}],
    "granitemoehybrid": [
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 128, "layer_types": _MIXED},
        {
            **{**_MAMBA, "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 64},
            **{"layer_types": _MIXED, "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_conv_bias": False},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
            **{"logits_scaling": 2.0, "attention_bias": True, "mamba_proj_bias": True},
        },
    ],
    "bamba": [
        {**_MAMBA, "attn_layer_indices": [1, 3]},
        {**_MAMBA, "attn_layer_indices": [0], "mamba_n_groups": 2, "attention_bias": True, "mlp_bias": True},
    ],
    "falcon_h1": [
        {
            **{**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 3, "embedding_multiplier": 3.0},
            **{"lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_out_multiplier": 1.3},
            **{"attention_in_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6},
            **{"mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.5, 1.5, 0.8, 1.25, 0.7]},
        },
        {
            **{**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 3, "mamba_n_groups": 2, "mamba_rms_norm": True},
            **{"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
            **{"key_multiplier": 0.7, "attention_out_multiplier": 1.3, "ssm_in_multiplier": 1.2},
            **{"ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.5, 1.5, 0.8, 1.25, 0.7]},
        },
    ],
    "lfm2_moe": [
        {**_EXPERTS, "num_hidden_layers": 4, "layer_types": _CONVOLVED, "num_dense_layers": 1},
        {
            **{**_EXPERTS, "num_hidden_layers": 4, "layer_types": _CONVOLVED, "num_dense_layers": 0},
            **{"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "conv_bias": True},
        },
    ],
    "lfm2": [
        {"num_hidden_layers": 4, "layer_types": _CONVOLVED, "block_multiple_of": 64},
        {
            **{"num_hidden_layers": 4, "layer_types": _CONVOLVED, "block_auto_adjust_ff_dim": False},
            **{"conv_L_cache": 5, "conv_bias": True},
        },
    ],
    "cwm": [{"bos_token_id": 1, "sliding_window": 9, "head_dim": 16, "rope_parameters": _LLAMA3_ROPE}],
}
"""By family, what its configurations have beside the sizes: all of its options in one of them or another."""


def option_config(family: str, number: int, tied: bool = False, **sizes: Any) -> PretrainedConfig:
    """The family's configuration with the options of this number."""
    fields = {**_SIZES, "num_hidden_layers": 3, "tie_word_embeddings": tied, **OPTIONS[family][number], **sizes}
    return AutoConfig.for_model(family, **fields)


def family_config(
    family: str, tied: bool = False, vocab_size: int = VOCAB_SIZE, num_layers: int = 3
) -> PretrainedConfig:
    """family: "llama" (with llama3 rope scaling), "qwen2", "qwen3", or "mistral"."""
    sizes = {**_SIZES, "tie_word_embeddings": tied, "vocab_size": vocab_size, "num_hidden_layers": num_layers}
    if family == "llama":
        return LlamaConfig(**sizes, rope_parameters=_LLAMA3_ROPE)
    if family == "qwen2":
        return Qwen2Config(**sizes)
    if family == "qwen3":
        return Qwen3Config(**sizes, head_dim=32)
    if family == "mistral":
        return MistralConfig(**sizes, sliding_window=None)
    raise ValueError(family)


def save_tiny_model(
    directory: Path,
    family: str,
    tied: bool = False,
    max_shard_size: str = "5GB",
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 3,
) -> PreTrainedModel:
    """Writes the checkpoint and its tokenizer; returns the model in float32, to be the oracle."""
    return save_random_model(directory, family_config(family, tied, vocab_size, num_layers), max_shard_size, seed)


def save_random_model(
    directory: Path, config: PretrainedConfig, max_shard_size: str = "5GB", seed: int = 0
) -> PreTrainedModel:
    """As save_tiny_model, for any config."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of 1 and biases of 0, transformers' initial values, would hide a missing norm or bias. The
            # matrices are larger than at initialisation, so that greedy text does not settle on one token.
            if name.endswith("norm.weight") and (model.config.model_type not in ONE_PLUS):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.15)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    save_byte_tokenizer(directory)
    return model


def save_byte_tokenizer(directory: Path) -> None:
    """A token for each byte, in the order of the byte-level alphabet, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
