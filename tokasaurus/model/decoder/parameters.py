"""How many parameters a model has. Needs no torch."""

from typing import NamedTuple

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.info import ClassFacts
from tokasaurus.checkpoint.spec import (
    AttentionSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    ShortConvSpec,
    StateSpec,
)
from tokasaurus.model.parallel.mesh import Mesh


class OfClass(NamedTuple):
    """Parameters of a rank's part of a model that transformers' class computes."""

    num_all: int
    num_in_linears: int
    """How many of these linear layers have, without an LM head that is this rank's embedding."""
    num_tied: int
    """Weights of such a head."""


def of_class(facts: ClassFacts, info: ModelInfo, mesh: Mesh) -> OfClass:
    """What stages of the model share but layers, embedding and LM head counts on each of them."""
    rows = [facts.counts[index] for index in mesh.stage_layers(info)] + [facts.counts[info.num_layers]]
    divided, whole, other_divided, other_whole = (sum(column) for column in zip(*rows, strict=True))
    part = mesh.vocab_shard(info.vocab_size)[1] / info.vocab_size
    embedding, head = (int(part * num) for num in (facts.num_embedding, facts.num_head))
    in_linears = divided // mesh.tp_size + whole + mesh.is_last_stage * head
    num_all = in_linears + other_divided // mesh.tp_size + other_whole + mesh.is_first_stage * embedding
    if not info.tie_embeddings or not mesh.is_last_stage:
        return OfClass(num_all, in_linears, 0)
    if mesh.is_first_stage:
        return OfClass(num_all, in_linears, embedding)
    return OfClass(num_all + embedding, in_linears + embedding, 0)


def num_parameters(info: ModelInfo, mesh: Mesh, is_active: bool = False) -> int:
    """Parameters of this rank's part of the model; is_active: with only so many experts as a token has.

    Raises ValueError if the model cannot be divided among the ranks."""
    if info.of_class is not None:
        return of_class(info.of_class, info, mesh).num_all
    spec, mesh = info.spec, mesh.for_model(info)
    count = sum(_of_layer(spec.layers[index], info.hidden_size, mesh, is_active) for index in mesh.stage_layers(info))
    is_first, is_last = mesh.is_first_stage, mesh.is_last_stage
    vocab = mesh.vocab_shard(info.vocab_size)[1]
    num_tables = is_first + is_last - (is_first and is_last and info.tie_embeddings)
    count += num_tables * vocab * info.hidden_size
    return count + is_last * (_of_norm(spec.final_norm, info.hidden_size) + vocab * spec.has_head_bias)


def num_in_float32(info: ModelInfo, mesh: Mesh) -> int:
    """How many of the parameters are float32, whatever the model's dtype, apart from norms: of routers and states."""
    layers = [info.spec.layers[index] for index in mesh.stage_layers(info)]
    count = sum(_of_router(layer.mlp, info.hidden_size) for layer in layers if isinstance(layer.mlp, ExpertsSpec))
    return count + sum(_beside_linears(layer.state, mesh) for layer in layers if layer.state is not None)


def num_in_adapter(info: ModelInfo, mesh: Mesh, rank: int) -> int:
    """Numbers that this rank of the model has of an adapter (LoRA) of all linear layers but those of experts; models
    with states take none."""
    count, hidden_size = 0, info.hidden_size
    for layer in (info.spec.layers[index] for index in mesh.stage_layers(info)):
        attention, mlp = layer.attention, layer.mlp
        if attention is None:
            continue
        query = mesh.shard(attention.num_heads, "attention heads")[1] * attention.head_dim
        key = mesh.kv_head_shard(attention.num_kv_heads)[1] * attention.head_dim
        count += 4 * hidden_size + 2 * query + 2 * key
        if isinstance(mlp, MLPSpec):
            count += (2 + mlp.is_gated) * (hidden_size + mesh.shard(mlp.width, "intermediate_size")[1])
    return rank * count


def _of_layer(layer: LayerSpec, hidden_size: int, mesh: Mesh, is_active: bool) -> int:
    count = 0 if layer.attention is None else _of_attention(layer.attention, hidden_size, mesh)
    count += 0 if layer.state is None else _of_state(layer.state, hidden_size, mesh)
    count += 0 if layer.mlp is None else _of_mlp(layer.mlp, hidden_size, mesh, is_active)
    norms = layer.attention_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm
    return count + sum(_of_norm(norm, hidden_size) for norm in norms)


def _of_attention(attention: AttentionSpec, hidden_size: int, mesh: Mesh) -> int:
    is_first = mesh.tp_rank == 0
    query = mesh.shard(attention.num_heads, "attention heads")[1] * attention.head_dim
    key = mesh.kv_head_shard(attention.num_kv_heads)[1] * attention.head_dim
    projected = query * (1 + attention.has_out_gate) + 2 * key
    count = hidden_size * (projected + query) + projected * attention.has_qkv_bias
    normed = 2 * attention.head_dim
    if attention.norm_over == "width" or attention.norm_by_head:
        normed = query + key
    count += _of_norm(attention.query_key_norm, normed) + attention.has_sinks * query // attention.head_dim
    return count + is_first * hidden_size * attention.has_out_bias  # added once, by the first rank


def _of_state(state: StateSpec, hidden_size: int, mesh: Mesh) -> int:
    tp_size, is_first = mesh.tp_size, mesh.tp_rank == 0
    channels = state.num_channels(tp_size)
    if isinstance(state, GatedDeltaSpec):
        width, heads = state.num_value_heads * state.value_dim // tp_size, state.num_value_heads // tp_size
        count = hidden_size * (channels + 2 * width + 2 * heads)
    elif isinstance(state, ShortConvSpec):
        count = 4 * hidden_size * channels + (3 * channels + is_first * hidden_size) * state.has_bias
    else:
        width, heads = state.num_heads * state.head_dim // tp_size, state.num_heads // tp_size
        outputs = width + channels + heads
        count = hidden_size * (outputs + width) + outputs * state.has_bias + is_first * hidden_size * state.has_out_bias
    return count + _beside_linears(state, mesh)


def _beside_linears(state: StateSpec, mesh: Mesh) -> int:
    """Of the convolution, and of vectors."""
    channels = state.num_channels(mesh.tp_size)
    if isinstance(state, GatedDeltaSpec):
        return channels * state.conv_size + 2 * state.num_value_heads // mesh.tp_size + state.value_dim
    if isinstance(state, ShortConvSpec):
        return channels * (state.conv_size + state.has_bias)
    heads = state.num_heads // mesh.tp_size
    return channels * (state.conv_size + state.has_conv_bias) + heads * (3 + state.has_norm * state.head_dim)


def _of_mlp(mlp: MLPSpec | ExpertsSpec, hidden_size: int, mesh: Mesh, is_active: bool) -> int:
    if isinstance(mlp, ExpertsSpec):
        num_experts = mlp.router.num_chosen if is_active else mlp.router.num_experts
        of_expert = _of_mlp(mlp.expert, hidden_size, Mesh() if mesh.whole_experts else mesh, is_active)
        of_experts = num_experts * of_expert // (mesh.tp_size if mesh.whole_experts else 1)
        count = _of_router(mlp, hidden_size) + of_experts
        return count if mlp.shared is None else count + _of_mlp(mlp.shared, hidden_size, mesh, is_active)
    width = mesh.shard(mlp.width, "intermediate_size")[1]
    inputs, is_first = 1 + mlp.is_gated, mesh.tp_rank == 0
    count = (inputs + 1) * hidden_size * width + inputs * width * mlp.has_bias
    return count + is_first * hidden_size * mlp.has_bias + 4 * (mlp.activation == "xielu")


def _of_router(mlp: ExpertsSpec, hidden_size: int) -> int:
    """With the gate of the shared expert."""
    num_outputs, num_experts = mlp.router.num_experts + mlp.has_shared_gate, mlp.router.num_experts
    return num_outputs * (hidden_size + mlp.router.has_bias) + num_experts * mlp.router.has_choice_bias


def _of_norm(norm: NormSpec | None, size: int) -> int:
    return 0 if norm is None else norm.num_vectors * size
