"""The table of model families, and how many parameters a model of one has. Needs no torch."""

from dataclasses import dataclass

from tokasaurus.checkpoint import CheckpointError, ModelInfo
from tokasaurus.model.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The differences between model families."""

    qkv_bias: bool = False
    """Biases on the query, key and value projections."""

    qk_norm: bool = False
    """RMS norms over each head's query and key, before rotary."""


FAMILIES = {
    "llama": DecoderOptions(),  # Llama 3.x, and models of the same architecture such as SmolLM2
    "qwen2": DecoderOptions(qkv_bias=True),  # Qwen 2 and 2.5
    "qwen3": DecoderOptions(qk_norm=True),  # Qwen 3, the dense models
}
"""Options of the decoder by model_type in config.json."""


def options_of(info: ModelInfo) -> DecoderOptions:
    """Raises CheckpointError for an unregistered family."""
    if info.family not in FAMILIES:
        raise CheckpointError(f"model_type {info.family!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[info.family]


def num_parameters(info: ModelInfo, mesh: Mesh) -> int:
    """Parameters of this rank's part of the model. Raises CheckpointError for an unregistered family, and ValueError
    if the model cannot be divided among the ranks."""
    options, hidden_size = options_of(info), info.hidden_size
    query = mesh.shard(info.num_heads, "attention heads")[1] * info.head_dim
    projected = query + 2 * mesh.kv_head_shard(info.num_kv_heads)[1] * info.head_dim
    attention = hidden_size * (projected + query) + projected * options.qkv_bias + 2 * info.head_dim * options.qk_norm
    mlp = 3 * hidden_size * mesh.shard(info.intermediate_size, "intermediate_size")[1]
    norms = 2 * hidden_size
    count = len(mesh.stage_layers(info)) * (attention + mlp + norms)
    is_first, is_last = mesh.is_first_stage, mesh.is_last_stage
    num_tables = is_first + is_last - (is_first and is_last and info.tie_embeddings)
    return count + num_tables * mesh.vocab_shard(info.vocab_size)[1] * hidden_size + is_last * hidden_size
