"""Families most of whose layers have a state of fixed size in place of keys and values: Qwen 3 Next and 3.5, LFM 2."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokasaurus.checkpoint.families.experts import EXPERTS_OF_QWEN, STACKED_EXPERTS, sparse_layers
from tokasaurus.checkpoint.families.family import FULL, Family, Settings, StoredTensors
from tokasaurus.checkpoint.json_files import CheckpointError, positive_int
from tokasaurus.checkpoint.spec import (
    ExpertsSpec,
    GatedDeltaSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    ShortConvSpec,
)

_MAX_HEADS, _MAX_SIZE = 1 << 16, 1 << 14
LINEAR, CONV = "linear_attention", "conv"


def _kinds(config: Settings, other: str, default: Callable[[int], bool]) -> list[str]:
    """FULL or `other` for each layer, not all of them the other. default: whether a layer has attention where
    layer_types is absent."""
    kinds = config.fields.get("layer_types")
    if kinds is None:
        kinds = [FULL if default(index) else other for index in range(config.num_layers)]
    if not isinstance(kinds, list) or any(kind not in (FULL, other) for kind in kinds):
        raise CheckpointError(f"layer_types {kinds!r} is not supported, only {FULL!r} and {other!r}")
    if len(kinds) != config.num_layers:
        raise CheckpointError(f"layer_types has {len(kinds)} entries for num_hidden_layers {config.num_layers}")
    if FULL not in kinds:
        raise CheckpointError("models without attention in any layer are not supported")
    return kinds


def _size(config: Settings, name: str, maximum: int = _MAX_SIZE) -> int:
    return positive_int(config.fields, name, maximum)


def _of_qwen(config: Settings, mlps: Sequence[MLPSpec | ExpertsSpec]) -> ModelSpec:
    """mlps: of each layer."""
    if config.mlp().activation != "silu":
        raise CheckpointError(f"hidden_act {config.fields['hidden_act']!r} is not supported, only 'silu'")
    interval = _size(config, "full_attention_interval")
    norm, bias = config.norm(in_float32=True), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm, has_out_gate=True)
    state = GatedDeltaSpec(
        num_key_heads=_size(config, "linear_num_key_heads", _MAX_HEADS),
        num_value_heads=_size(config, "linear_num_value_heads", _MAX_HEADS),
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        conv_size=_size(config, "linear_conv_kernel_dim"),
        eps=norm.eps,
    )
    if state.num_value_heads % state.num_key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {state.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{state.num_key_heads}"
        )
    plain = LayerSpec(attention, None, norm, norm)
    layers = [
        replace(plain, mlp=mlp) if kind == FULL else replace(plain, attention=None, mlp=mlp, state=state)
        for kind, mlp in zip(_kinds(config, LINEAR, lambda index: (index + 1) % interval == 0), mlps, strict=True)
    ]
    return config.model(layers, norm)


def _experts_of_qwen(config: Settings) -> ExpertsSpec:
    return config.experts(
        *("num_experts|num_local_experts", "moe_intermediate_size"),
        shared_width=_size(config, "shared_expert_intermediate_size", 1 << 24),
        has_shared_gate=True,
        normalizes=config.flag("norm_topk_prob"),
    )


def _qwen3_next(config: Settings) -> ModelSpec:
    has_experts, experts = sparse_layers(config), _experts_of_qwen(config) if config.count("num_experts") else None
    mlps = [
        experts if experts is not None and has_experts(index) else config.mlp() for index in range(config.num_layers)
    ]
    return _of_qwen(config, mlps)


def _qwen3_5(config: Settings) -> ModelSpec:
    return _of_qwen(config, [config.mlp()] * config.num_layers)


def _lfm2(config: Settings) -> ModelSpec:
    width = config.width if config.fields.get("block_ff_dim") is None else _size(config, "block_ff_dim", 1 << 24)
    if config.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if config.fields.get("block_ffn_dim_multiplier") is not None:
            multiple = _size(config, "block_multiple_of")
            width = -(-int(config.number("block_ffn_dim_multiplier") * width) // multiple) * multiple
    indices = config.fields.get("full_attn_idxs")
    if indices is not None and not (isinstance(indices, list) and all(type(each) is int for each in indices)):
        raise CheckpointError(f"full_attn_idxs must be a list of whole numbers, not {indices!r}")
    kinds = _kinds(config, CONV, lambda index: indices is None or index in indices)
    return _of_lfm2(config, kinds, [replace(config.mlp(), width=width)] * config.num_layers)


def _of_lfm2(config: Settings, kinds: Sequence[str], mlps: Sequence[MLPSpec | ExpertsSpec]) -> ModelSpec:
    if config.fields.get("tie_embedding") is not None:
        config.fields["tie_word_embeddings"] = config.flag("tie_embedding")
    norm = config.norm("norm_eps")
    plain = LayerSpec(config.attention(query_key_norm=norm), None, norm, norm)
    state = ShortConvSpec(config.hidden_size, _size(config, "conv_L_cache"), config.flag("conv_bias"))
    if state.conv_size < 2:
        raise CheckpointError(f"conv_L_cache {state.conv_size} is not supported: it must be greater than 1")
    layers = [
        replace(plain, mlp=mlp) if kind == FULL else replace(plain, attention=None, mlp=mlp, state=state)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return config.model(layers, norm)


def _lfm2_moe(config: Settings) -> ModelSpec:
    num_dense = config.count("num_dense_layers")
    experts = config.experts(
        *("num_experts", "moe_intermediate_size"),
        scores="sigmoid",
        has_choice_bias=config.flag("use_expert_bias"),
        normalizes=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )
    mlps = [config.mlp() if index < num_dense else experts for index in range(config.num_layers)]
    return _of_lfm2(config, _kinds(config, CONV, lambda _: True), mlps)


_LINEAR_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval", "attention_bias"),
)
_LINEAR_DEFAULTS: dict[str, Any] = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    **{"head_dim": 256, "partial_rotary_factor": 0.25, "num_attention_heads": 16, "max_position_embeddings": 32768},
}
_COUNTS = ("num_experts", "num_local_experts")
_OUTPUTS = {f"state.{name}": f"linear_attn.{name}" for name in ("out_proj", "norm")}
_OF_DELTA = {**_OUTPUTS, "state.conv": "linear_attn.conv1d", "state": "linear_attn"}
_GATED_QUERY = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
_OF_QWEN3_5 = StoredTensors(
    {**_OF_DELTA, **{f"state.{name}_proj": f"linear_attn.in_proj_{name}" for name in "zba"}},
    fused={**_GATED_QUERY, "linear_attn.in_proj_qkv": ("state.q_proj", "state.k_proj", "state.v_proj")},
    by_head=("self_attn.q_proj",),
    adds_one=True,
    has_draft_layers=True,
)
_SHARED = {
    **{f"mlp.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_OF_LFM2 = {
    **{
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "model.embedding_norm",
    },
    **{f"mlp.{here}_proj": f"feed_forward.{there}" for here, there in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{"self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm"},
    **{"self_attn.k_norm": "self_attn.k_layernorm", "state.conv": "conv.conv", "state.out_proj": "conv.out_proj"},
}
_LFM2_KEYS = ("norm_eps", "conv_L_cache", "conv_bias", "tie_embedding")
_LFM2_DEFAULTS: dict[str, Any] = {
    **{"rope_theta": 1e6, "norm_eps": 1e-5, "conv_L_cache": 3, "tie_word_embeddings": True, "vocab_size": 65536},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000},
}
_IN_CONV = {"conv.in_proj": ("state.b_proj", "state.c_proj", "state.x_proj")}

FAMILIES = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _qwen3_next,
        applied=(
            *_LINEAR_KEYS,
            *EXPERTS_OF_QWEN,
            *("num_local_experts", "num_experts", "shared_expert_intermediate_size"),
        ),
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        defaults={
            **_LINEAR_DEFAULTS,
            **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "decoder_sparse_step": 1},
            **{"shared_expert_intermediate_size": 512, "num_key_value_heads": 2, "norm_topk_prob": True},
        },
        stored=StoredTensors(
            {**_OF_DELTA, **_SHARED},
            fused={
                **_GATED_QUERY,
                "linear_attn.in_proj_qkvz": ("state.q_proj", "state.k_proj", "state.v_proj", "state.z_proj"),
                "linear_attn.in_proj_ba": ("state.b_proj", "state.a_proj"),
            },
            by_head=("self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
            adds_one=True,
            has_draft_layers=True,
            stack=STACKED_EXPERTS,
        ),
        has_partial_rotary=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _qwen3_5,
        applied=_LINEAR_KEYS,
        defaults={
            **_LINEAR_DEFAULTS,
            **{"vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
            "num_key_value_heads": 4,
        },
        stored=_OF_QWEN3_5,
        has_partial_rotary=True,
        with_images=("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        _lfm2,
        applied=(
            *(*_LFM2_KEYS, "full_attn_idxs", "block_ff_dim", "block_auto_adjust_ff_dim", "block_multiple_of"),
            "block_ffn_dim_multiplier",
        ),
        defaults={
            **_LFM2_DEFAULTS,
            **{"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
            "intermediate_size": 12288,
        },
        without_effect=("rms_norm_eps",),
        stored=StoredTensors(_OF_LFM2, fused=_IN_CONV),
    ),
}
