"""How many parameters a model has. Needs no torch."""

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import LayerSpec, NormSpec
from tokasaurus.model.parallel.mesh import Mesh


def num_parameters(info: ModelInfo, mesh: Mesh) -> int:
    """Parameters of this rank's part of the model. Raises ValueError if the model cannot be divided among the ranks."""
    if info.of_class is not None:
        return info.of_class.num_parameters
    spec = info.spec
    count = sum(_of_layer(spec.layers[index], info.hidden_size, mesh) for index in mesh.stage_layers(info))
    is_first, is_last = mesh.is_first_stage, mesh.is_last_stage
    vocab = mesh.vocab_shard(info.vocab_size)[1]
    num_tables = is_first + is_last - (is_first and is_last and info.tie_embeddings)
    count += num_tables * vocab * info.hidden_size
    return count + is_last * (_of_norm(spec.final_norm, info.hidden_size) + vocab * spec.has_head_bias)


def _of_layer(layer: LayerSpec, hidden_size: int, mesh: Mesh) -> int:
    attention, mlp, is_first = layer.attention, layer.mlp, mesh.tp_rank == 0
    query = mesh.shard(attention.num_heads, "attention heads")[1] * attention.head_dim
    key = mesh.kv_head_shard(attention.num_kv_heads)[1] * attention.head_dim
    projected = query + 2 * key
    count = hidden_size * (projected + query) + projected * attention.has_qkv_bias
    normed = 2 * attention.head_dim
    if attention.norm_over == "width" or attention.norm_by_head:
        normed = query + key
    count += _of_norm(attention.query_key_norm, normed) + attention.has_sinks * query // attention.head_dim
    width = mesh.shard(mlp.width, "intermediate_size")[1]
    inputs = 1 + mlp.is_gated
    count += (inputs + 1) * hidden_size * width + inputs * width * mlp.has_bias
    count += is_first * hidden_size * (attention.has_out_bias + mlp.has_bias)  # added once, by the first rank
    count += 4 * (mlp.activation == "xielu")
    norms = layer.attention_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm
    return count + sum(_of_norm(norm, hidden_size) for norm in norms)


def _of_norm(norm: NormSpec | None, size: int) -> int:
    return 0 if norm is None else norm.num_vectors * size
