"""Run the layers with async tensor parallelism in forwards of many tokens, and plainly in the others.

There, hidden states are divided by tokens among the ranks. The two halves of a layer compute what DecoderLayer's
methods of the same names do. Between them, attention needs all tokens of this rank's heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.attention.row_split import Attends, attended_by_operation
from tokasaurus.model.decoder.compile import Compiler, relate_sizes
from tokasaurus.model.decoder.decoder import Decoder, DecoderLayer, zero_nonfinite
from tokasaurus.model.decoder.model import LayerExecutor
from tokasaurus.model.execution.executors import CompiledExecutor
from tokasaurus.model.parallel.async_tp import FUSE_WITH_GEMMS, all_tokens, gather_matmul, matmul_scatter, own_tokens
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, S = T / tp_size tokens of this rank, E hidden size, H query heads and K key/value heads of
# this rank, D head size


class AsyncTPExecutor:
    """Two compiled variants of the layers. A forward uses one of them, according to its number of tokens.

    Every rank must see the same number, so that all choose the same variant.
    """

    always_on_kernels = False

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        plain: LayerExecutor,
        mesh: Mesh,
        compiler: Compiler,
        threshold: int,
    ) -> None:
        """plain: runs forwards of less than `threshold` tokens. Others must be padded to a multiple of tp_size."""
        self._plain = plain
        self._mesh = mesh
        self._threshold = threshold
        self._by_shards = CompiledExecutor(model, backend, compiler, plain, run_layers, FUSE_WITH_GEMMS)

    @staticmethod
    def computes(layer: LayerSpec) -> bool:
        """Whether the halves below compute such a layer."""
        return layer.is_plain

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if len(hidden) < self._threshold:
            return self._plain.run(hidden, cos_sin, attends)
        return all_tokens(self._by_shards.run(own_tokens(hidden, self._mesh), cos_sin, attends), self._mesh)


def run_layers(layers: Sequence[DecoderLayer], hidden: Tensor, cos_sin: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """hidden [S, E], cos_sin [T, 1, D] -> [S, E]; to be compiled. caches: of the backend."""
    relate_sizes(cos_sin)
    for layer in layers:
        query, key, value, is_finite = before_attention(layer, hidden, cos_sin)
        attended = attended_by_operation(query, key, value, layer.own_attention.layer_index, caches=caches)
        hidden = after_attention(layer, attended, is_finite, hidden)
    return hidden


def before_attention(layer: DecoderLayer, hidden: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [S, E], cos_sin [T, 1, D] -> query [T, H, D], key and value [T, K, D]; bool [T], whether keys and values
    are finite on this rank. Keys and values that are not finite become zeros."""
    attention, mesh = layer.own_attention, layer.mesh
    assert layer.attention_norm is not None
    # The compiler does not relate the sizes of two arguments by itself.
    torch._check(cos_sin.shape[0] == hidden.shape[0] * mesh.tp_size)  # type: ignore[no-untyped-call]
    heads = attention.heads(gather_matmul(layer.attention_norm(hidden), attention.qkv.weight, mesh))
    if attention.qkv.bias is not None:
        heads = heads + attention.heads(attention.qkv.bias)
    query, key, value = attention.split_heads(heads, layer.table(cos_sin))
    return query, *zero_nonfinite(key, value)


def after_attention(layer: DecoderLayer, attended: Tensor, is_finite: Tensor, hidden: Tensor) -> Tensor:
    """attended [T, H, D], is_finite [T] from before_attention, hidden [S, E] -> hidden [S, E] for the next layer."""
    attention, mlp, mesh = layer.own_attention, layer.dense_mlp, layer.mesh
    assert layer.mlp_norm is not None
    torch._check(attended.shape[0] == hidden.shape[0] * mesh.tp_size)  # type: ignore[no-untyped-call]
    # Only this rank may have seen that a token is not finite, and another rank has its hidden state: the sum tells it.
    features = torch.where(is_finite[:, None], attended.flatten(1), torch.nan)
    hidden = hidden + matmul_scatter(features, attention.out.weight, mesh)
    gate_up = gather_matmul(layer.mlp_norm(hidden), mlp.gate_up.weight, mesh)
    return hidden + matmul_scatter(mlp.gate_up.activate(gate_up), mlp.down.weight, mesh)
