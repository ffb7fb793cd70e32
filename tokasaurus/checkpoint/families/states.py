"""Families most of whose layers have a state of fixed size in place of keys and values: Qwen 3 Next and 3.5, LFM 2,
Granite 4, Bamba; and Falcon H1, whose layers have both."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokasaurus.checkpoint.families.experts import EXPERTS_OF_QWEN, STACKED_EXPERTS, sparse_layers
from tokasaurus.checkpoint.families.family import FULL, ExpertStack, Family, Settings, StoredTensors
from tokasaurus.checkpoint.families.granite import MULTIPLIERS, layer_of_granite, scales_of_granite
from tokasaurus.checkpoint.json_files import CheckpointError, positive_int
from tokasaurus.checkpoint.spec import (
    ExpertsSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mamba2Spec,
    MLPSpec,
    ModelSpec,
    ShortConvSpec,
)

_MAX_HEADS, _MAX_SIZE = 1 << 16, 1 << 14
LINEAR, CONV = "linear_attention", "conv"
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Names of transformers 4."""


def _kinds(config: Settings, other: str, default: Callable[[int], bool]) -> list[str]:
    """FULL or `other` for each layer, not all of them the other. default: whether a layer has attention where
    layer_types is absent."""
    kinds = config.fields.get("layer_types")
    if kinds is None:
        kinds = [FULL if default(index) else other for index in range(config.num_layers)]
    if isinstance(kinds, list):
        kinds = [_OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
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


def _qwen3_5_moe(config: Settings) -> ModelSpec:
    return _of_qwen(config, [_experts_of_qwen(config)] * config.num_layers)


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


def _mamba2(config: Settings, out_bias: str = "mamba_proj_bias") -> Mamba2Spec:
    """out_bias: key of the bias of the last linear layer."""
    if config.mlp().activation != "silu":
        raise CheckpointError(f"hidden_act {config.fields['hidden_act']!r} is not supported, only 'silu'")
    num_heads, expanded = _size(config, "mamba_n_heads", _MAX_HEADS), _size(config, "mamba_expand") * config.hidden_size
    if config.fields.get("mamba_d_ssm") is not None:
        expanded = _size(config, "mamba_d_ssm", 1 << 24)
    if config.fields["mamba_d_head"] == "auto":
        config.fields["mamba_d_head"] = expanded // num_heads
    head_dim, num_groups = _size(config, "mamba_d_head"), _size(config, "mamba_n_groups", _MAX_HEADS)
    if head_dim * num_heads != expanded:
        raise CheckpointError(f"mamba_d_head {head_dim} x mamba_n_heads {num_heads} is not {expanded}")
    if num_heads % num_groups:
        raise CheckpointError(f"mamba_n_heads {num_heads} is not a multiple of mamba_n_groups {num_groups}")
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=_size(config, "mamba_d_state"),
        num_groups=num_groups,
        conv_size=_size(config, "mamba_d_conv"),
        eps=config.norm().eps,
        has_conv_bias=config.flag("mamba_conv_bias"),
        has_bias=config.flag("mamba_proj_bias"),
        has_out_bias=config.flag(out_bias),
        min_step=_min_step(config),
    )


def _min_step(config: Settings) -> float:
    limits = config.fields.get("time_step_limit")
    if limits is None:
        return 0.0
    if not isinstance(limits, list | tuple) or len(limits) != 2 or type(limits[0]) not in (int, float):
        raise CheckpointError(f"time_step_limit must be two numbers, not {limits!r}")
    if limits[0] < 0 or limits[1] not in (math.inf, {"__float__": "Infinity"}):
        raise CheckpointError(f"time_step_limit {limits!r} is not supported: the second number must be infinite")
    return float(limits[0])


def _granitemoehybrid(config: Settings) -> ModelSpec:
    position = config.fields.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise CheckpointError(f"position_embedding_type {position!r} is not supported, only null, 'nope' and 'rope'")
    mlp: MLPSpec | ExpertsSpec = replace(config.mlp(), width=_size(config, "shared_intermediate_size", 1 << 24))
    if config.count("num_local_experts"):
        experts = config.experts("num_local_experts", scores="softmax_of_chosen")
        assert isinstance(mlp, MLPSpec)
        mlp = replace(experts, shared=mlp)
    plain, state = layer_of_granite(config, mlp), _mamba2(config)
    full = replace(plain, attention=replace(plain.own_attention, rotary=0 if position == "rope" else None))
    kinds = _kinds(config, LINEAR, lambda _: False)
    layers = [full if kind == FULL else replace(plain, attention=None, state=state) for kind in kinds]
    return config.model(layers, config.norm(), **scales_of_granite(config))


def _bamba(config: Settings) -> ModelSpec:
    config.fields["partial_rotary_factor"] = 0.5  # whatever the file says
    indices = config.fields.get("attn_layer_indices") or []
    if not isinstance(indices, list) or any(type(each) is not int for each in indices):
        raise CheckpointError(f"attn_layer_indices must be a list of whole numbers, not {indices!r}")
    if not any(0 <= index < config.num_layers for index in indices):
        raise CheckpointError("models without attention in any layer are not supported")
    norm, bias, state = config.norm(), config.flag("attention_bias"), _mamba2(config)
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    plain = LayerSpec(attention, config.mlp(has_bias=config.flag("mlp_bias")), norm, norm)
    layers = [
        plain if index in indices else replace(plain, attention=None, state=state) for index in range(config.num_layers)
    ]
    return config.model(layers, norm)


def _falcon_h1(config: Settings) -> ModelSpec:
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    norm, attention = config.norm(), config.attention(has_qkv_bias=bias, has_out_bias=bias)
    gate, x, b, c, step = _factors(config, "ssm_multipliers", 5)
    state = replace(
        _mamba2(config, "projectors_bias"),
        has_norm=config.flag("mamba_rms_norm"),
        norm_before_gate=config.flag("mamba_norm_before_gate"),
        scales=(gate, x, b, c, step),
    )
    of_gate, of_down = _factors(config, "mlp_multipliers", 2)
    into, into_state, of_key = (config.number(f"{name}_multiplier") for name in ("attention_in", "ssm_in", "key"))
    out, out_of_state = config.number("attention_out_multiplier"), config.number("ssm_out_multiplier")
    factors = {
        **{f"self_attn.{name}_proj.weight": into for name in "qv"},
        **{"self_attn.k_proj.weight": into * of_key, "self_attn.k_proj.bias": of_key},
        **{f"state.{name}_proj.weight": into_state for name in ("z", "x", "b", "c", "dt")},
    }
    both = ("self_attn.o_proj", out), ("state.out_proj", out_of_state), ("mlp.gate_proj", of_gate)
    for module, factor in (*both, ("mlp.down_proj", of_down)):
        factors |= {f"{module}.weight": factor, f"{module}.bias": factor}
    own = tuple((name, factor) for name, factor in factors.items() if factor != 1)
    layer = LayerSpec(attention, config.mlp(has_bias=mlp_bias), norm, norm, state=state, weight_factors=own)
    scales = config.number("embedding_multiplier"), config.number("lm_head_multiplier")
    layers = [layer] * config.num_layers
    return config.model(layers, norm, embedding_scale=scales[0], logit_scale=scales[1])


def _factors(config: Settings, name: str, count: int) -> list[float]:
    """Of a list of numbers; 1 if it is absent."""
    values = config.fields.get(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count or any(type(each) not in (int, float) for each in values):
        raise CheckpointError(f"{name} must be {count} numbers, not {values!r}")
    return [float(each) for each in values]


_MAMBA_KEYS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "attention_bias"),
)
_MAMBA_DEFAULTS: dict[str, Any] = {
    **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "time_step_limit": (0.0, math.inf)},
}
_FALCON_FACTORS = tuple(
    f"{name}_multiplier"
    for name in ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
)
_OF_MAMBA = {
    **{f"state.{name}": f"mamba.{name}" for name in ("out_proj", "norm")},
    **{"state.conv": "mamba.conv1d", "state": "mamba"},
}
_IN_MAMBA = {"mamba.in_proj": tuple(f"state.{name}_proj" for name in ("z", "x", "b", "c", "dt"))}
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
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _qwen3_5_moe,
        applied=(
            *(*_LINEAR_KEYS, "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
            "shared_expert_intermediate_size",
        ),
        without_effect=("router_aux_loss_coef", "output_router_logits", "intermediate_size"),
        defaults={
            **_LINEAR_DEFAULTS,
            **{"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True},
            **{"shared_expert_intermediate_size": 512, "intermediate_size": 512},
        },
        stored=replace(_OF_QWEN3_5, names={**_OF_QWEN3_5.names, **_SHARED}, stack=STACKED_EXPERTS),
        has_partial_rotary=True,
        with_images=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _granitemoehybrid,
        applied=(
            *(*_MAMBA_KEYS, *MULTIPLIERS, "num_local_experts", "num_experts_per_tok", "shared_intermediate_size"),
            "position_embedding_type",
        ),
        refused=("layers_block_type",),
        without_effect=("router_aux_loss_coef", "output_router_logits", "mamba_chunk_size"),
        defaults={
            **dict.fromkeys(MULTIPLIERS, 1.0),
            **_MAMBA_DEFAULTS,
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        },
        stored=StoredTensors(
            {**_OF_MAMBA, "mlp.gate": "block_sparse_moe.router.layer", "mlp.down_proj": "shared_mlp.output_linear"},
            fused={**_IN_MAMBA, "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
            stack=ExpertStack("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
            is_shared_alone=True,
        ),
        is_kv_heads_optional=True,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        _bamba,
        applied=(*_MAMBA_KEYS, "attn_layer_indices", "mlp_bias"),
        without_effect=(
            *("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "layers_block_type"),
            "partial_rotary_factor",
        ),
        defaults={
            **{**_MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
            "max_position_embeddings": 262_144,
        },
        stored=StoredTensors(
            {
                **{**_OF_MAMBA, "post_attention_layernorm": "pre_ff_layernorm", "model.norm": "model.final_layernorm"},
                **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            },
            fused=_IN_MAMBA,
        ),
        is_kv_heads_optional=True,
        has_partial_rotary=True,
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        _falcon_h1,
        applied=(
            *(*_MAMBA_KEYS, *_FALCON_FACTORS, "mlp_multipliers", "ssm_multipliers", "mamba_d_ssm", "mamba_rms_norm"),
            *("mamba_norm_before_gate", "projectors_bias", "mlp_bias"),
        ),
        without_effect=("mamba_chunk_size", "num_logits_to_keep", "layer_types", "layers_block_type"),
        defaults={
            **{**_MAMBA_DEFAULTS, **dict.fromkeys(_FALCON_FACTORS, 1.0), "rms_norm_eps": 1e-5},
            **{"mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "num_key_value_heads": 8},
            "max_position_embeddings": 8192,
        },
        stored=StoredTensors(
            {
                **{**_OF_MAMBA, "post_attention_layernorm": "pre_ff_layernorm", "model.norm": "model.final_layernorm"},
                **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            },
            fused=_IN_MAMBA,
        ),
        is_kv_heads_optional=True,
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        _lfm2_moe,
        applied=(
            *(*_LFM2_KEYS, "num_dense_layers", "use_expert_bias", "routed_scaling_factor", "norm_topk_prob"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        ),
        without_effect=("rms_norm_eps", "output_router_logits"),
        defaults={
            **_LFM2_DEFAULTS,
            **{"num_dense_layers": 2, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
            **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "intermediate_size": 7168},
            **{"hidden_size": 2048, "num_hidden_layers": 32},
        },
        stored=StoredTensors(
            {
                **{**_OF_LFM2, "mlp.gate": "feed_forward.gate", "mlp.choice": "feed_forward"},
                **{
                    f"mlp.experts.*.{here}_proj": f"feed_forward.experts.*.{there}"
                    for here, there in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
                },
            },
            fused=_IN_CONV,
            choice_bias="expert_bias",
            stack=ExpertStack("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        ),
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
