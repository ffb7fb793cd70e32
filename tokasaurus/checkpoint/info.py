"""Reads a checkpoint's configuration files.

They are read as plain JSON, since the configuration classes of transformers import torch. Two spellings are supported:
transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes rope_parameters and dtype.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.checkpoint.json_files import read_json

DTYPES = ("float32", "float16", "bfloat16")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices [vocabulary, hidden size] in a checkpoint."""

# Far above every published model. They keep the products of sizes below 2**63, and refuse a damaged or hostile file
# before memory is allocated for it.
_MAX_LAYERS = 10_000
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 14
_MAX_WIDTH = 1 << 24  # of hidden states, of the MLP, and of the vocabulary
_MAX_CONTEXT = 1 << 22  # the rotary table takes about 2 GB then
_MAX_THETA = 1e15


@dataclass(frozen=True, slots=True)
class RopeInfo:
    """Rotary embedding. Source of the llama3 scaling: the Llama 3.1 model card's reference code."""

    theta: float
    scaling_type: str = "default"
    """Either "default" or "llama3"; the fields below are only used by "llama3"."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_length: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The contents of config.json and generation_config.json, with the same field names for every family."""

    family: str
    """config.json's model_type, such as "llama"."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeInfo
    tie_embeddings: bool
    """Whether embedding and LM head are one matrix; read_model_info gives config.json's word, and
    tied_embeddings.fit_to_tensors that of the tensors."""
    eos_ids: tuple[int, ...]
    """Union of eos_token_id in both files."""
    dtype: str
    """Of the stored weights, such as "bfloat16"."""
    embedding_tensor: str = EMBEDDING
    """The stored tensor that is the embedding: HEAD where the two are tied and only the LM head is stored."""

    @property
    def head_layers(self) -> float:
        """How many layers have as many parameters as the LM head."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.vocab_size / (attention + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """How the configurations of one model family are checked and completed."""

    architecture: str
    """The only accepted class name in `architectures`."""
    must_be_off: tuple[str, ...]
    """Fields of unsupported features, which would change the computation: a checkpoint that sets one is refused."""
    default_head_dim: int | None = None
    """Value of an absent head_dim; None = hidden_size / num_attention_heads."""


FAMILIES = {
    "llama": FamilyConfig("LlamaForCausalLM", ("attention_bias", "mlp_bias")),
    "qwen2": FamilyConfig("Qwen2ForCausalLM", ("use_sliding_window",)),
    "qwen3": FamilyConfig("Qwen3ForCausalLM", ("attention_bias", "use_sliding_window"), default_head_dim=128),
}


def read_model_info(directory: Path) -> ModelInfo:
    """Parse config.json and, if it exists, generation_config.json.

    Raises CheckpointError, naming the file and the field, if a file is missing or malformed, or if this code would
    compute the model wrongly (unknown family, unsupported rotary scaling, quantised weights).
    """
    path = directory / "config.json"
    config = read_json(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        return _parse(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _parse(config: dict[str, Any], generation: dict[str, Any]) -> ModelInfo:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"model_type {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _refuse_unsupported(config, name, family)
    hidden_size = _positive_int(config, "hidden_size", _MAX_WIDTH)
    num_heads = _positive_int(config, "num_attention_heads", _MAX_HEADS)
    num_kv_heads = _positive_int(
        config, "num_key_value_heads", _MAX_HEADS, default=num_heads if name == "llama" else None
    )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    default_head_dim = family.default_head_dim or hidden_size // num_heads
    head_dim = _positive_int(config, "head_dim", _MAX_HEAD_DIM, default=default_head_dim)
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd, which rotary embedding does not allow")
    vocab_size = _positive_int(config, "vocab_size", _MAX_WIDTH)
    return ModelInfo(
        family=name,
        num_layers=_positive_int(config, "num_hidden_layers", _MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive_int(config, "intermediate_size", _MAX_WIDTH),
        vocab_size=vocab_size,
        context_length=_positive_int(config, "max_position_embeddings", _MAX_CONTEXT),
        norm_eps=_positive_float(config, "rms_norm_eps", 1.0, default=1e-6),
        rope=_parse_rope(config),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        eos_ids=tuple(sorted(_eos_ids(config, vocab_size) | _eos_ids(generation, vocab_size))),
        dtype=_parse_dtype(config),
    )


def _refuse_unsupported(config: dict[str, Any], name: str, family: FamilyConfig) -> None:
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise CheckpointError(f"architectures {architectures} is not supported; {name} is {family.architecture}")
    for field in family.must_be_off:
        if config.get(field):
            raise CheckpointError(f"{field} = {config[field]!r} is not supported for {name}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise CheckpointError(f"quantization_config (quant_method {method!r}): quantised weights are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(each != "full_attention" for each in layer_types):
        raise CheckpointError(f"layer_types {layer_types!r} is not supported, only 'full_attention'")


def _parse_rope(config: dict[str, Any]) -> RopeInfo:
    """transformers 5 puts all fields in rope_parameters; 4 has rope_theta and, for a scaled model, rope_scaling."""
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{name} must be an object, not {given!r}")
        fields |= given
    scaling_type = fields.get("rope_type", fields.get("type", "default"))
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters per layer type are not supported")
    if fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    theta_source = fields if "rope_theta" in fields else config
    theta = _positive_float(theta_source, "rope_theta", _MAX_THETA, default=10000.0)
    if theta <= 1:
        raise CheckpointError(f"rope_theta must be greater than 1, not {theta!r}")
    if scaling_type == "default":
        return RopeInfo(theta)
    if scaling_type != "llama3":
        raise CheckpointError(f"rope type {scaling_type!r} is not supported, only 'default' and 'llama3'")
    rope = RopeInfo(
        theta,
        "llama3",
        factor=_positive_float(fields, "factor", _MAX_THETA),
        low_freq_factor=_positive_float(fields, "low_freq_factor", _MAX_THETA),
        high_freq_factor=_positive_float(fields, "high_freq_factor", _MAX_THETA),
        original_context_length=_positive_int(fields, "original_max_position_embeddings", _MAX_CONTEXT),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError("high_freq_factor must be greater than low_freq_factor")
    return rope


def _parse_dtype(config: dict[str, Any]) -> str:
    """An absent dtype means float32, as in transformers."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(dtype)


def _eos_ids(config: dict[str, Any], vocab_size: int) -> set[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(f"eos_token_id {value!r} is not a token id below vocab_size {vocab_size}")
    return set(ids)


def _positive_int(fields: dict[str, Any], name: str, maximum: int, default: int | None = None) -> int:
    """An absent or null field takes the default; without a default it is an error."""
    value = _value(fields, name, default)
    if type(value) is not int or not 1 <= value <= maximum:
        raise CheckpointError(f"{name} must be a positive integer, at most {maximum}, not {value!r}")
    return value


def _positive_float(fields: dict[str, Any], name: str, maximum: float, default: float | None = None) -> float:
    value = _value(fields, name, default)
    # not NaN, which compares as false
    if type(value) not in (int, float) or not 0 < value <= maximum:
        raise CheckpointError(f"{name} must be a positive number, at most {maximum:g}, not {value!r}")
    return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    """An absent or null field is false."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{name} must be true or false, not {value!r}")
    return bool(value)


def _value(fields: dict[str, Any], name: str, default: float | None) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{name} is missing")
    return value
