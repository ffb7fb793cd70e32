"""Facts of a model with Llama's layers, of any sizes."""

from dataclasses import replace
from typing import Any

from tokasaurus.checkpoint import ModelInfo, RopeInfo
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec


def plain_info(
    family: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    context_length: int,
    norm_eps: float,
    rope: RopeInfo,
    tie_embeddings: bool,
    eos_ids: tuple[int, ...],
    dtype: str,
) -> ModelInfo:
    norm = NormSpec(norm_eps)
    attention = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    layer = LayerSpec(attention, MLPSpec(intermediate_size), norm, norm)
    spec = ModelSpec((layer,) * num_layers, hidden_size, vocab_size, norm, (rope,))
    return ModelInfo(family, spec, context_length, tie_embeddings, eos_ids, dtype)


def with_layers(info: ModelInfo, num_layers: int | None = None, **changes: Any) -> ModelInfo:
    """num_layers: None for as many as before; layers repeat. changes: fields of LayerSpec, for each."""
    layers = info.spec.layers
    count = len(layers) if num_layers is None else num_layers
    changed = tuple(replace(layers[index % len(layers)], **changes) for index in range(count))
    return replace(info, spec=replace(info.spec, layers=changed))
