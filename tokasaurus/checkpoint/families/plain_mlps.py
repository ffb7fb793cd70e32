"""Families with a plain MLP: StarCoder 2, Nemotron, Arcee, Apertus and Jais 2."""

from tokasaurus.checkpoint.families.family import Family, GGUFFiles, Settings, StoredTensors
from tokasaurus.checkpoint.spec import LayerSpec, ModelSpec


def _starcoder2(config: Settings) -> ModelSpec:
    norm, bias = config.norm("norm_epsilon", kind="layer", has_bias=True), config.flag("use_bias")
    attention = config.attention(window=config.window, has_qkv_bias=bias, has_out_bias=bias)
    return config.model(LayerSpec(attention, config.mlp(is_gated=False, has_bias=bias), norm, norm), norm)


def _nemotron(config: Settings) -> ModelSpec:
    norm, bias = config.norm("norm_eps", kind="layer", has_bias=True), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    mlp = config.mlp(is_gated=False, has_bias=config.flag("mlp_bias"))
    return config.model(LayerSpec(attention, mlp, norm, norm), norm)


def _arcee(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    mlp = config.mlp(is_gated=False, has_bias=config.flag("mlp_bias"))
    return config.model(LayerSpec(attention, mlp, norm, norm), norm)


def _jais2(config: Settings) -> ModelSpec:
    norm, bias = config.norm("layer_norm_eps", kind="layer", has_bias=True), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias)
    mlp = config.mlp(is_gated=False, has_bias=config.flag("mlp_bias"))
    return config.model(LayerSpec(attention, mlp, norm, norm), norm)


def _apertus(config: Settings) -> ModelSpec:
    norm, bias = config.norm(), config.flag("attention_bias")
    attention = config.attention(has_qkv_bias=bias, has_out_bias=bias, query_key_norm=norm)
    return config.model(LayerSpec(attention, config.mlp(is_gated=False), norm, norm), norm)


FAMILIES = {
    "apertus": Family(
        "ApertusForCausalLM",
        _apertus,
        applied=("attention_bias",),
        defaults={
            **{"rms_norm_eps": 1e-5, "hidden_act": "xielu"},
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            },
        },
        stored=StoredTensors(
            {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
        ),
        is_kv_heads_optional=True,
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        _jais2,
        applied=("layer_norm_eps", "attention_bias", "mlp_bias"),
        without_effect=("rms_norm_eps",),
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        is_kv_heads_optional=True,
        gguf=GGUFFiles("jais2"),
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _starcoder2,
        applied=("norm_epsilon", "use_bias", "sliding_window"),
        without_effect=("rms_norm_eps", "residual_dropout", "embedding_dropout"),
        defaults={
            **{"norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
            "tie_word_embeddings": True,
        },
        stored=StoredTensors({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
        gguf=GGUFFiles("starcoder2"),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _nemotron,
        applied=("norm_eps", "attention_bias", "mlp_bias"),
        without_effect=("rms_norm_eps",),
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        stored=StoredTensors(adds_one=True),
        has_partial_rotary=True,
        gguf=GGUFFiles("nemotron"),
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        _arcee,
        applied=("attention_bias", "mlp_bias"),
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        is_kv_heads_optional=True,
        gguf=GGUFFiles("arcee", is_permuted=True),
    ),
}
