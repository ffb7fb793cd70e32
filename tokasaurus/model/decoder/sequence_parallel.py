"""Decoder layers for async tensor parallelism: hidden states divided by tokens among the ranks.

The two halves of a layer compute what DecoderLayer's methods of the same names do. Between them, attention needs all
tokens of this rank's heads.
"""

# T tokens in this forward, S = T / tp_size tokens of this rank, E hidden size, H query heads and K key/value heads of
# this rank, D head size

from collections.abc import Sequence

import torch
from torch import Tensor

from tokasaurus.model.attention.row_split import attend
from tokasaurus.model.decoder.decoder import DecoderLayer, zero_nonfinite
from tokasaurus.model.parallel.async_tp import gather_matmul, matmul_scatter


def run_layers(layers: Sequence[DecoderLayer], hidden: Tensor, cos_sin: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """hidden [S, E], cos_sin [T, 1, D] -> [S, E]; to be compiled. caches: of the backend."""
    for layer in layers:
        query, key, value, is_finite = before_attention(layer, hidden, cos_sin)
        attended = torch.empty_like(query)
        attend(query, key, value, attended, caches, layer.attention.layer_index)
        hidden = after_attention(layer, attended, is_finite, hidden)
    return hidden


def before_attention(layer: DecoderLayer, hidden: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [S, E], cos_sin [T, 1, D] -> query [T, H, D], key and value [T, K, D]; bool [T], whether keys and values
    are finite on this rank. Those that are not are zeros."""
    attention, mesh = layer.attention, layer.mesh
    # The compiler does not relate the sizes of two arguments by itself.
    torch._check(cos_sin.shape[0] == hidden.shape[0] * mesh.tp_size)  # type: ignore[no-untyped-call]
    heads = attention.heads(gather_matmul(layer.attention_norm(hidden), attention.qkv.weight, mesh))
    if attention.qkv.bias is not None:
        heads = heads + attention.heads(attention.qkv.bias)
    query, key, value = attention.split_heads(heads, cos_sin)
    return query, *zero_nonfinite(key, value)


def after_attention(layer: DecoderLayer, attended: Tensor, is_finite: Tensor, hidden: Tensor) -> Tensor:
    """attended [T, H, D], is_finite [T] from before_attention, hidden [S, E] -> hidden [S, E] for the next layer."""
    attention, mlp, mesh = layer.attention, layer.mlp, layer.mesh
    torch._check(attended.shape[0] == hidden.shape[0] * mesh.tp_size)  # type: ignore[no-untyped-call]
    # Only this rank may have seen that a token is not finite, and another rank has its hidden state: the sum tells it.
    features = torch.where(is_finite[:, None], attended.flatten(1), torch.nan)
    hidden = hidden + matmul_scatter(features, attention.out.weight, mesh)
    gate_up = gather_matmul(layer.mlp_norm(hidden), mlp.gate_up.weight, mesh)
    return hidden + matmul_scatter(mlp.gate_up.activate(gate_up), mlp.down.weight, mesh)
