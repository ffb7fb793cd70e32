"""Families with experts whose layers are else those of dense families: Mixtral's and Qwen's kin, OLMoE, Granite, ERNIE
4.5, Hunyuan, Llama 4, and GPT-OSS with sinks, biases and limited gates."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokasaurus.checkpoint.families.family import FULL, ExpertStack, Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.families.granite import MULTIPLIERS, layer_of_granite, scales_of_granite
from tokasaurus.checkpoint.families.hunyuan import attention_of_hunyuan, rope_of_hunyuan
from tokasaurus.checkpoint.json_files import CheckpointError, json_object, positive_float, positive_int
from tokasaurus.checkpoint.rope import MAX_CONTEXT, RopeInfo
from tokasaurus.checkpoint.spec import AttentionSpec, ExpertsSpec, GateLimits, LayerSpec, MLPSpec, ModelSpec, NormSpec


def _layers(
    config: Settings,
    attentions: list[AttentionSpec],
    experts: ExpertsSpec,
    has_experts: Callable[[int], bool] = lambda _: True,
    mlp: MLPSpec | None = None,
    norm: NormSpec | None = None,
) -> list[LayerSpec]:
    """attentions: of each layer. mlp: of layers without experts."""
    norm, mlp = norm or config.norm(), mlp or config.mlp()
    return [
        LayerSpec(attention, experts if has_experts(index) else mlp, norm, norm)
        for index, attention in enumerate(attentions)
    ]


def sparse_layers(config: Settings) -> Callable[[int], bool]:
    """Which layers of Qwen's models have experts."""
    dense, step = (
        config.fields.get("mlp_only_layers") or [],
        positive_int(config.fields, "decoder_sparse_step", 1 << 16),
    )
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        raise CheckpointError(f"mlp_only_layers must be a list of whole numbers, not {dense!r}")
    return lambda index: index not in dense and (index + 1) % step == 0


def _qwen2_moe(config: Settings) -> ModelSpec:
    attention, first = config.attention(has_qkv_bias=config.flag("qkv_bias")), config.count("max_window_layers")
    has_windows = config.flag("use_sliding_window")
    windows = config.windows(lambda index: index % 2 == 0 and index < first) if has_windows else config.no_windows()
    experts = config.experts(
        *("num_experts|num_local_experts", "moe_intermediate_size"),
        shared_width=positive_int(config.fields, "shared_expert_intermediate_size", 1 << 24),
        has_shared_gate=True,
        normalizes=config.flag("norm_topk_prob"),
    )
    attentions = [replace(attention, window=window) for window in windows]
    return config.model(_layers(config, attentions, experts, sparse_layers(config)), config.norm())


def _qwen3_moe(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    window = config.window if config.flag("use_sliding_window") else None
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm, window=window)
    experts = config.experts(
        "num_experts|num_local_experts", "moe_intermediate_size", normalizes=config.flag("norm_topk_prob")
    )
    layers = _layers(config, [attention for _ in config.no_windows()], experts, sparse_layers(config))
    return config.model(layers, norm)


def _mixtral(config: Settings) -> ModelSpec:
    attention = config.attention(window=config.window)
    experts = config.experts("num_local_experts|num_experts", normalizes=True)
    return config.model(_layers(config, [attention] * config.num_layers, experts), config.norm())


def _phimoe(config: Settings) -> ModelSpec:
    for key in ("rope_parameters", "rope_scaling"):
        setting = json_object(config.fields, key)
        scale, of_long = setting.get("short_mscale"), setting.get("long_mscale")
        if scale != of_long:
            raise CheckpointError(f"{key} with short_mscale {scale!r} and long_mscale {of_long!r} is not supported")
        if scale is not None:  # transformers' class has the short factors for sequences of any length
            kept = {name: value for name, value in setting.items() if not name.endswith("mscale")}
            config.fields[key] = {**kept, "attention_factor": scale, "long_factor": setting.get("short_factor")}
    bias, norm = config.flag("attention_bias"), config.norm(kind="layer", has_bias=True)
    jitter = config.fields.get("router_jitter_noise")
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise CheckpointError(f"router_jitter_noise must be a number from 0 to 1, not {jitter!r}")
    config.fields["num_experts_per_tok"] = 2  # whatever the file says
    experts = config.experts("num_local_experts|num_experts", scores="sparsemixer", jitter=jitter)
    attention = config.attention(window=config.window, has_qkv_bias=bias, has_out_bias=bias)
    layers = _layers(config, [attention] * config.num_layers, experts, norm=norm)
    return config.model(layers, norm, has_head_bias=config.flag("lm_head_bias"))


def _olmoe(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm, norm_over="width")
    experts = config.experts("num_experts|num_local_experts", normalizes=config.flag("norm_topk_prob"))
    return config.model(_layers(config, [attention for _ in config.no_windows()], experts), norm)


def _granitemoe(config: Settings) -> ModelSpec:
    experts = config.experts("num_local_experts", scores="softmax_of_chosen")
    return config.model(layer_of_granite(config, experts), config.norm(), **scales_of_granite(config))


def _ernie4_5_moe(config: Settings) -> ModelSpec:
    bias, width = config.flag("use_bias"), positive_int(config.fields, "moe_intermediate_size", 1 << 24)
    experts = config.experts(
        *("moe_num_experts|num_experts|num_local_experts", "moe_intermediate_size", "moe_k|num_experts_per_tok"),
        shared_width=config.count("moe_num_shared_experts") * width,
        has_choice_bias=True,
        normalizes=True,
        min_sum=config.number("moe_norm_min"),
    )
    if experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, has_bias=bias))
    start, step, end = (config.fields.get(f"moe_layer_{name}") for name in ("start_index", "interval", "end_index"))
    if type(start) is not int or type(end) is not int or type(step) is not int or step < 1:
        raise CheckpointError("moe_layer_start_index, moe_layer_end_index and moe_layer_interval must be whole numbers")
    last = config.num_layers - 1 if end == -1 else end
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    layers = _layers(
        config,
        [attention for _ in config.no_windows()],
        experts,
        lambda index: (index + 1) % step == 0 and start <= index <= last,
        config.mlp(has_bias=bias),
    )
    return config.model(layers, config.norm(), has_head_bias=bias)


def _hunyuan_v1_moe(config: Settings) -> ModelSpec:
    for key in ("num_experts", "moe_topk"):  # files have a list, of each layer
        value = config.fields.get(key)
        if isinstance(value, list) and len(value) == config.num_layers and all(each == value[0] for each in value):
            config.fields[key] = value[0]
    experts = config.experts(
        *("num_experts|num_local_experts", "intermediate_size", "moe_topk|num_experts_per_tok"),
        shared_width=config.width,
        normalizes=True,
    )
    rope = rope_of_hunyuan(config)
    layers = _layers(config, [attention_of_hunyuan(config) for _ in config.no_windows()], experts)
    return config.model(layers, config.norm(), rotary=(rope,))


def _sigmoid_experts(config: Settings) -> ExpertsSpec:
    """Of DeepSeek's router, which others have too."""
    width = positive_int(config.fields, "moe_intermediate_size", 1 << 24)
    return config.experts(
        *("n_routed_experts", "moe_intermediate_size"),
        shared_width=config.count("n_shared_experts") * width,
        scores="sigmoid",
        has_choice_bias=True,
        num_groups=positive_int(config.fields, "n_group", 1 << 14),
        num_chosen_groups=positive_int(config.fields, "topk_group", 1 << 14),
        normalizes=config.flag("norm_topk_prob"),
        min_sum=1e-20,
        scale=config.number("routed_scaling_factor"),
    )


def _glm4_moe(config: Settings) -> ModelSpec:
    norm, first = config.norm(), config.count("first_k_dense_replace")
    own = norm if config.flag("use_qk_norm") else None
    attention = config.attention(has_qkv_bias=config.flag("attention_bias"), query_key_norm=own)
    attentions = [attention for _ in config.no_windows()]
    return config.model(_layers(config, attentions, _sigmoid_experts(config), lambda index: index >= first), norm)


def _dots1(config: Settings) -> ModelSpec:
    norm, bias, first = config.norm(), config.flag("attention_bias"), config.count("first_k_dense_replace")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm)
    full, has_windows = config.count("max_window_layers"), config.fields.get("sliding_window") is not None
    windows = config.windows(lambda index: index >= full) if has_windows else config.no_windows()
    attentions = [replace(attention, window=window) for window in windows]
    return config.model(_layers(config, attentions, _sigmoid_experts(config), lambda index: index >= first), norm)


def _minimax_m2(config: Settings) -> ModelSpec:
    if (rotated := config.fields.get("rotary_dim")) is not None:
        rotary_dim = positive_int({"rotary_dim": rotated}, "rotary_dim", config.head_dim)
        config.fields.setdefault("partial_rotary_factor", rotary_dim / config.head_dim)
    norm = config.norm()
    attention = config.attention(query_key_norm=norm, norm_over="width")
    experts = config.experts("num_local_experts|num_experts", scores="sigmoid", has_choice_bias=True, normalizes=True)
    return config.model(_layers(config, [attention for _ in config.no_windows()], experts), norm)


def _gpt_oss(config: Settings) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, has_sinks=True)
    limits = GateLimits(config.number("swiglu_limit"), config.number("swiglu_alpha"), up_offset=1.0)
    mlp: dict[str, Any] = {"has_bias": True, "gate_limits": limits}
    experts = config.experts("num_local_experts|num_experts", mlp=mlp, scores="softmax_of_chosen", has_bias=True)
    attentions = [replace(attention, window=window) for window in config.windows(lambda index: index % 2 == 0)]
    return config.model(_layers(config, attentions, experts), config.norm())


def _llama4_text(config: Settings) -> ModelSpec:
    fields, rope, norm = config.fields, config.rope, config.norm()
    rotates = fields.get("no_rope_layers") or [
        (index + 1) % positive_int(fields, "no_rope_layer_interval", 1 << 16) != 0 for index in range(config.num_layers)
    ]
    with_experts, step = fields.get("moe_layers"), positive_int(fields, "interleave_moe_layer_step", 1 << 16)
    if with_experts is None:
        with_experts = list(range(step - 1, config.num_layers, step))
    for name, value in (("no_rope_layers", rotates), ("moe_layers", with_experts)):
        if not isinstance(value, list) or any(not isinstance(each, int) for each in value):
            raise CheckpointError(f"{name} must be a list of whole numbers, not {value!r}")
    if len(rotates) < config.num_layers:
        raise CheckpointError(f"no_rope_layers has {len(rotates)} entries for num_hidden_layers {config.num_layers}")
    bias = config.flag("attention_bias")
    own = replace(norm, has_weight=False) if config.flag("use_qk_norm") else None
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    rotated = replace(attention, query_key_norm=own, norms_after_rotary=own is not None)
    tables, plain = [rope], replace(attention, rotary=None)
    if config.fields.get("attn_temperature_tuning"):
        scale, original = positive_float(fields, "attn_scale", 1e3), positive_int(fields, "floor_scale", MAX_CONTEXT)
        turns_nothing = RopeInfo(rope.theta, "linear", factor=math.inf)
        of_queries = replace(turns_nothing, position_scale=scale, original_context_length=original, position_offset=1)
        tables, plain = [rope, of_queries], replace(plain, query_rotary=1)
    chunks = _llama4_chunks(config, rotates)
    attentions = [
        replace(rotated if each else plain, chunk=chunk) for each, chunk in zip(rotates, chunks, strict=False)
    ]
    experts = config.experts(
        "num_local_experts", shared_width=config.width, scores="sigmoid_of_chosen", weighs_inputs=True
    )
    dense = replace(config.mlp(), width=positive_int(fields, "intermediate_size_mlp", 1 << 24))
    layers = _layers(config, attentions, experts, with_experts.__contains__, dense)
    return config.model(layers, norm, rotary=tuple(tables))


def _llama4_chunks(config: Settings, rotates: list[int]) -> list[int | None]:
    """Of each layer; None: it sees all tokens."""
    types = config.fields.get("layer_types")
    chunk = config.fields.get("attention_chunk_size")
    if types is None:
        types = ["chunked_attention" if each and chunk is not None else FULL for each in rotates]
    if not isinstance(types, list) or any(each not in (FULL, "chunked_attention") for each in types):
        raise CheckpointError(f"layer_types {types!r} is not supported, only '{FULL}' and 'chunked_attention'")
    if "chunked_attention" in types:
        chunk = positive_int(config.fields, "attention_chunk_size", MAX_CONTEXT)
    return [None if each == FULL else chunk for each in types[: config.num_layers]]


_LOSSES = ("router_aux_loss_coef", "output_router_logits")
STACKED_EXPERTS = ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_MIXTRAL = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.choice": "block_sparse_moe",
    **{
        f"mlp.experts.*.{name}_proj": f"block_sparse_moe.experts.*.w{n}"
        for name, n in (("gate", 1), ("up", 3), ("down", 2))
    },
}
_SHARED = {f"mlp.shared.{name}_proj": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS_OF_QWEN = (
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts_per_tok",
)
"""Keys."""
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_SAME_WIDTH = ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count")
"""Keys of GGUF files, of experts as wide as an MLP and one that is shared."""
_LLAMA4_CHUNKS = {"attention.sliding_window": 8192, "attention.sliding_window_pattern": 4}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = ({"expert_gating_func": number} for number in (1, 2, 3))
"""Key of GGUF files: llama.cpp's number of what is made of the router's logits."""
_COUNTS = ("num_experts", "num_local_experts")
_DEEPSEEK = (
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "n_group"),
    *("topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "attention_bias"),
)

FAMILIES = {
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        applied=(
            *(*EXPERTS_OF_QWEN, *_COUNTS, "shared_expert_intermediate_size", "qkv_bias"),
            *("use_sliding_window", "sliding_window", "max_window_layers"),
        ),
        without_effect=_LOSSES,
        defaults={
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1},
            **{"shared_expert_intermediate_size": 5632, "qkv_bias": True, "sliding_window": 4096},
            "max_window_layers": 28,
        },
        stored=StoredTensors(
            {
                **{f"mlp.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
                "mlp.shared_gate": "mlp.shared_expert_gate",
            },
            stack=STACKED_EXPERTS,
        ),
        gguf=GGUFFiles("qwen2moe", fields={"norm_topk_prob": False}, required=_SOFTMAX),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        applied=(*EXPERTS_OF_QWEN, *_COUNTS, "attention_bias", "use_sliding_window", "sliding_window"),
        without_effect=(*_LOSSES, "max_window_layers"),
        defaults={
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
            "sliding_window": 4096,
        },
        stored=StoredTensors(stack=STACKED_EXPERTS),
        gguf=GGUFFiles("qwen3moe", fields={"norm_topk_prob": True}, required=_SOFTMAX),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _mixtral,
        applied=(*_COUNTS, "num_experts_per_tok", "sliding_window"),
        without_effect=(*_LOSSES, "router_jitter_noise"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        stored=StoredTensors(_MIXTRAL),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("llama", needed=("expert_count",), is_permuted=True, required=_SOFTMAX),
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        _phimoe,
        applied=(*(*_COUNTS, "router_jitter_noise", "attention_bias", "lm_head_bias", "sliding_window"),),
        without_effect=(*_LOSSES, "input_jitter_noise", "num_experts_per_tok"),
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 16, "router_jitter_noise": 0.01},
        },
        stored=StoredTensors(_MIXTRAL),
        is_kv_heads_optional=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _olmoe,
        applied=(*_COUNTS, "num_experts_per_tok", "norm_topk_prob", "attention_bias"),
        refused=("clip_qkv",),
        without_effect=_LOSSES,
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        stored=StoredTensors(stack=STACKED_EXPERTS),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("olmoe", fields={"norm_topk_prob": False}, required=_SOFTMAX),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        _granitemoe,
        applied=("num_local_experts", "num_experts_per_tok", "attention_bias", *MULTIPLIERS),
        without_effect=_LOSSES,
        defaults={**dict.fromkeys(MULTIPLIERS, 1.0), "num_local_experts": 8, "num_experts_per_tok": 2},
        stored=StoredTensors(
            {"mlp.gate": "block_sparse_moe.router.layer"},
            stack=ExpertStack("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("granitemoe", is_permuted=True),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        _ernie4_5_moe,
        applied=(
            *("moe_num_experts", *_COUNTS, "moe_k", "num_experts_per_tok", "moe_intermediate_size", "use_bias"),
            *("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
            "moe_norm_min",
        ),
        without_effect=_LOSSES,
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6},
            **{"moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
            **{"moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
        },
        stored=StoredTensors(
            {**_SHARED, "mlp.choice": "mlp.moe_statics"},
            is_interleaved=True,
            has_choice_bias_row=True,
            stack=STACKED_EXPERTS,
        ),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("ernie4_5-moe", ignored=("expert_shared_feed_forward_length",), required=_SOFTMAX),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        _hunyuan_v1_moe,
        applied=(*_COUNTS, "moe_topk", "num_experts_per_tok", "attention_bias"),
        without_effect=("eod_token_id", "sep_token_id", "output_router_logits"),
        defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        stored=StoredTensors(
            {
                **{
                    f"self_attn.{short}_norm": f"self_attn.{name}_layernorm"
                    for short, name in (("q", "query"), ("k", "key"))
                },
                **{f"mlp.shared.{name}_proj": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
                "mlp.gate": "mlp.gate.wg",
            },
            stack=STACKED_EXPERTS,
        ),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("hunyuan-moe", ignored=_SAME_WIDTH, required=_SOFTMAX),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _glm4_moe,
        applied=(*_DEEPSEEK, "use_qk_norm"),
        refused=("num_local_experts",),
        without_effect=(*_LOSSES, "num_mtp_layers", "num_nextn_predict_layers"),
        defaults={
            **{"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8},
            **{"n_shared_experts": 1, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1},
        },
        stored=StoredTensors({**_SHARED, "mlp.choice": "mlp.gate"}, stack=STACKED_EXPERTS, has_draft_layers=True),
        has_partial_rotary=True,
        gguf=GGUFFiles("glm4moe", modules=_POST_NORM, required=_SIGMOID),
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        _dots1,
        applied=(*_DEEPSEEK, "sliding_window", "max_window_layers"),
        refused=("num_local_experts",),
        without_effect=_LOSSES,
        defaults={
            **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
            **{"moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62, "n_shared_experts": 0},
        },
        stored=StoredTensors({**_SHARED, "mlp.choice": "mlp.gate"}, stack=STACKED_EXPERTS),
        is_kv_heads_optional=True,
        gguf=GGUFFiles("dots1", required=_SIGMOID),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        _minimax_m2,
        applied=(*_COUNTS, "num_experts_per_tok", "rotary_dim"),
        without_effect=(*_LOSSES, "router_jitter_noise"),
        defaults={"head_dim": 128, "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8},
        stored=StoredTensors(_MIXTRAL),
        has_partial_rotary=True,
        gguf=GGUFFiles("minimax-m2", ignored=("expert_feed_forward_length",), required=_SIGMOID),
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _llama4_text,
        applied=(
            *("num_local_experts", "num_experts_per_tok", "intermediate_size_mlp", "moe_layers", "attention_bias"),
            *("interleave_moe_layer_step", "use_qk_norm", "no_rope_layers", "no_rope_layer_interval"),
            *("attention_chunk_size", "attn_temperature_tuning", "floor_scale", "attn_scale", "intermediate_size"),
        ),
        without_effect=(*_LOSSES, "router_jitter_noise"),
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "num_local_experts": 16},
            **{"num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1},
            **{"use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
            **{"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        },
        stored=StoredTensors(
            {
                "mlp.gate": "feed_forward.router",
                **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
                **{
                    f"mlp.shared.{name}_proj": f"feed_forward.shared_expert.{name}_proj"
                    for name in ("gate", "up", "down")
                },
                **{
                    f"mlp.experts.*.{name}_proj": f"feed_forward.experts.*.{name}_proj"
                    for name in ("gate", "up", "down")
                },
            },
            is_interleaved=True,
            stack=ExpertStack(
                "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", is_transposed=True
            ),
        ),
        with_images=("llama4", "Llama4ForConditionalGeneration"),
        # llama.cpp has no keys for the other sizes of chunks and temperature: each model has the defaults.
        gguf=GGUFFiles("llama4", required={**_SIGMOID, **_LLAMA4_CHUNKS}),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _gpt_oss,
        applied=(*_COUNTS, "num_experts_per_tok", "attention_bias", "sliding_window", "swiglu_alpha", "swiglu_limit"),
        without_effect=_LOSSES,
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "sliding_window": 128},
            **{"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
            **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                **{"original_max_position_embeddings": 4096, "rope_theta": 150000.0},
            },
        },
        stored=StoredTensors(
            {"mlp.gate": "mlp.router"},
            stack=replace(STACKED_EXPERTS, is_transposed=True, takes_turns=True),
        ),
        is_kv_heads_optional=True,
        gguf=GGUFFiles(
            "gpt-oss",
            modules={**_POST_NORM, "attn_sinks": "self_attn"},
            fields={"truncate": False},
            ignored=("expert_feed_forward_length",),
            required=_SOFTMAX_OF_CHOSEN,
        ),
    ),
}
