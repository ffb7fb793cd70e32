"""GGUF files of every family, as llama.cpp's converter writes them from a checkpoint of transformers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
    quantize,
)
from gguf.constants import ExpertGatingFuncType, RopeScalingType
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.checkpoint.helpers.gguf_files import byte_tokenizer

_ARCHITECTURES = {
    **{"mistral": MODEL_ARCH.LLAMA, "gemma3_text": MODEL_ARCH.GEMMA3, "olmo3": MODEL_ARCH.OLMO2},
    **{"phi": MODEL_ARCH.PHI2, "cohere": MODEL_ARCH.COMMAND_R, "ministral3": MODEL_ARCH.MISTRAL3},
    **{"glm": MODEL_ARCH.CHATGLM, "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE},
    **{"qwen2_moe": MODEL_ARCH.QWEN2MOE, "qwen3_moe": MODEL_ARCH.QWEN3MOE, "mixtral": MODEL_ARCH.LLAMA},
    **{"granitemoe": MODEL_ARCH.GRANITE_MOE, "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE},
    **{"minimax_m2": MODEL_ARCH.MINIMAXM2, "llama4_text": MODEL_ARCH.LLAMA4},
}
"""Those that are not named as the family."""
_PERMUTED = ("llama", "mistral", "ministral3", "smollm3", "olmo", "granite", "arcee", "mixtral", "granitemoe")
_ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "nemotron")
LLAMA4 = {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
_MAVERICK = {"num_local_experts": 128, "attention_bias": False, "no_rope_layers": None, "num_hidden_layers": 4}
WITH_EXPERTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen2_moe", 0, {}),
    ("qwen3_moe", 0, {}),
    ("mixtral", 0, {}),
    ("olmoe", 0, {}),
    ("granitemoe", 0, {}),
    ("granitemoe", 1, {}),
    ("ernie4_5_moe", 0, {}),
    ("hunyuan_v1_moe", 0, {}),
    ("hunyuan_v1_moe", 1, {}),
    ("glm4_moe", 0, {"num_nextn_predict_layers": 0}),
    ("glm4_moe", 1, {"num_nextn_predict_layers": 0}),
    ("dots1", 1, {}),
    ("minimax_m2", 0, {}),
    ("gpt_oss", 0, {}),
    ("llama4_text", 0, LLAMA4),
    ("llama4_text", 1, {**LLAMA4, **_MAVERICK}),
]
"""Families with experts, numbers of their options, and the values that llama.cpp takes to be every model's."""


def write_family_gguf(
    path: Path,
    model: PreTrainedModel,
    fuses_heads: bool = False,
    of_experts: GGMLQuantizationType | None = None,
    gating: int | None = None,
    others: Mapping[str, int] | None = None,
    num_tokens: int = 0,
) -> None:
    """In float32, with a tokenizer of a few tokens, or of num_tokens. fuses_heads: queries, keys and values are one
    tensor. of_experts: type of the matrices of experts. gating: expert_gating_func; None: as llama.cpp's conversion
    writes it. others: further metadata, without the architecture."""
    config = model.config
    family, num_layers = config.model_type, config.num_hidden_layers
    architecture = _ARCHITECTURES.get(family) or MODEL_ARCH[family.upper()]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[architecture])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _add_sizes(writer, config, head_dim)
    _add_options(writer, config)
    _add_expert_sizes(writer, config, gating)
    _add_rotary(writer, config, head_dim)
    for key, number in (others or {}).items():
        writer.add_uint32(f"{writer.arch}.{key}", number)
    tokenizer = byte_tokenizer()
    more = range(len(tokenizer["tokenizer.ggml.tokens"]), num_tokens)
    tokenizer["tokenizer.ggml.tokens"] += [f"<{number}>" for number in more]
    tokenizer["tokenizer.ggml.token_type"] += [1 for _ in more]
    for key, value in tokenizer.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    names = get_tensor_name_map(architecture, num_layers)
    fused: list[NDArray[np.float32]] = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = tensor.numpy()
        if family in _PERMUTED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            stored = _interleaved(stored, head_dim)
        if family in _ONE_PLUS and name.endswith("norm.weight"):
            stored = stored + np.float32(1)
        if name.endswith(("q_norm.weight", "k_norm.weight")) and stored.ndim == 1 and family == "cohere":
            stored = stored.reshape(-1, head_dim)
        if fuses_heads and name.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj")):
            fused.append(stored)  # weight and bias, in turn
            if len(fused) == 6:
                for kind, parts in (("weight", fused[::2]), ("bias", fused[1::2])):
                    writer.add_tensor(f"blk.{name.split('.')[2]}.attn_qkv.{kind}", np.concatenate(parts))
                fused.clear()
            continue
        if (tensors := _of_experts(name, stored, config)) is not None:
            for part, values in tensors.items():
                own = f"blk.{name.split('.')[2]}.{part}"
                if of_experts is not None and values.ndim == 3:
                    blocks = quantize(np.ascontiguousarray(values), of_experts)
                    writer.add_tensor(own, blocks, raw_dtype=of_experts)
                else:
                    writer.add_tensor(own, np.ascontiguousarray(values))
            continue
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_experts(name: str, stored: NDArray[np.float32], config: Any) -> dict[str, NDArray[np.float32]] | None:
    """Tensors of a layer, by their names in files, that are made of one of experts; None of another one. name: in
    transformers' class."""
    path, _, kind = name.rpartition(".")
    if kind == "e_score_correction_bias":
        return {"exp_probs_b.bias": stored.flatten()}
    if kind == "sinks":
        return {"attn_sinks.weight": stored}
    if path.endswith(("mlp.gate", "mlp.router", "block_sparse_moe.router", "mlp.gate.wg", "feed_forward.router")):
        return {f"ffn_gate_inp.{kind}": stored}
    if path.endswith("shared_expert_gate"):
        return {"ffn_gate_inp_shexp.weight": stored.flatten()}
    shared = re.search(r"shared_(?:experts?|mlp)\.(gate|up|down)_proj$", path)
    if shared is not None:
        return {f"ffn_{shared[1]}_shexp.weight": stored}
    if not path.endswith(".experts"):
        return None
    takes_turns, own = config.model_type == "gpt_oss", "bias" if kind.endswith("bias") else "weight"
    is_transposed = takes_turns or config.model_type == "llama4_text"
    if is_transposed and own == "weight":
        stored = stored.swapaxes(1, 2)
    if kind.startswith("down"):
        return {f"ffn_down_exps.{own}": stored}
    gate, up = (stored[:, ::2], stored[:, 1::2]) if takes_turns else np.split(stored, 2, axis=1)
    return {f"ffn_gate_exps.{own}": gate, f"ffn_up_exps.{own}": up}


def _add_expert_sizes(writer: GGUFWriter, config: Any, gating: int | None) -> None:
    def first(*names: str) -> Any:
        value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        return value[0] if isinstance(value, list) else value

    if (count := first("num_local_experts", "num_experts", "moe_num_experts")) is None:
        return
    family = config.model_type
    writer.add_expert_count(count)
    writer.add_expert_used_count(first("moe_topk", "num_experts_per_tok", "moe_k"))
    if family not in ("mixtral", "olmoe", "granitemoe"):
        writer.add_expert_feed_forward_length(first("moe_intermediate_size", "intermediate_size"))
    if family in ("qwen2_moe", "hunyuan_v1_moe"):
        writer.add_expert_shared_feed_forward_length(first("shared_expert_intermediate_size", "intermediate_size"))
    if family == "ernie4_5_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if family in ("glm4_moe", "dots1", "ernie4_5_moe"):
        writer.add_expert_shared_count(first("n_shared_experts", "moe_num_shared_experts"))
        writer.add_leading_dense_block_count(first("first_k_dense_replace", "moe_layer_start_index"))
    if (step := first("moe_layer_interval", "interleave_moe_layer_step")) is not None:
        writer.add_interleave_moe_layer_step(step)
    if gating is None and family in ("glm4_moe", "dots1", "minimax_m2"):
        gating = ExpertGatingFuncType.SIGMOID.value
    if gating is not None:
        writer.add_uint32(f"{writer.arch}.expert_gating_func", gating)
    if family in ("glm4_moe", "dots1"):
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_sizes(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif config.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)


def _add_options(writer: GGUFWriter, config: Any) -> None:
    written = {
        "sliding_window": writer.add_sliding_window,
        "clip_qkv": writer.add_clamp_kqv,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }
    for name, add in written.items():
        value = getattr(config, name, None)
        if value is not None and not (name == "sliding_window" and config.model_type == "smollm3"):
            add(value)
    if config.model_type in ("olmo3", "exaone4", "gemma3_text") and config.sliding_window is not None:
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])


def _add_rotary(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "dynamic":  # of Hunyuan
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        written = {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }
        for name, add in written.items():
            if rope.get(name) is not None:
                add(rope[name])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(1.0)
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _interleaved(stored: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """In each head, number i and number i + half become neighbours. stored: [heads * head size, ...]."""
    rows = [
        stored[start + offset]
        for start in range(0, len(stored), head_dim)
        for i in range(head_dim // 2)
        for offset in (i, i + head_dim // 2)
    ]
    return np.stack(rows)
