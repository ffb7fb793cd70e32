"""The attention layer: fused projections, optional query/key norms, rotary, and the paged backend."""

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.kernels.layer_kernels import LayerKernels, takes
from tokasaurus.model.layers.linear import FusedColumnLinear, OutputShard, RowLinear
from tokasaurus.model.layers.norm import RMSNorm
from tokasaurus.model.layers.rotary import rotate
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.weights import WeightPiece, whole

# T tokens, E hidden size, H query heads, K key/value heads, D head size


class Attention(nn.Module):
    """hidden [T, E] -> hidden + attention(norm(hidden)). May overwrite hidden.

    layer_index counts within this pipeline stage, as the KV cache does."""

    def __init__(
        self, info: ModelInfo, mesh: Mesh, layer_index: int, qkv_bias: bool, qk_norm: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._head_dim = info.head_dim
        self._norm_eps = info.norm_eps
        self._kernels: LayerKernels | None = None
        head_start, self._num_heads = mesh.shard(info.num_heads, "attention heads")
        kv_start, self._num_kv_heads = mesh.kv_head_shard(info.num_kv_heads)
        query_size = info.num_heads * info.head_dim
        query_shard = (head_start * info.head_dim, self._num_heads * info.head_dim)
        kv_size = info.num_kv_heads * info.head_dim
        kv_shard = (kv_start * info.head_dim, self._num_kv_heads * info.head_dim)
        outputs = [
            OutputShard("q_proj", query_size, *query_shard),
            OutputShard("k_proj", kv_size, *kv_shard),
            OutputShard("v_proj", kv_size, *kv_shard),
        ]
        self.qkv = FusedColumnLinear(info.hidden_size, outputs, qkv_bias, dtype)
        self.out = RowLinear("o_proj", query_size, query_shard, info.hidden_size, mesh, dtype)
        self.query_norm = RMSNorm(info.head_dim, info.norm_eps, dtype) if qk_norm else None
        self.key_norm = RMSNorm(info.head_dim, info.norm_eps, dtype) if qk_norm else None

    def pack(self, kernels: LayerKernels | None) -> None:
        """Rotate by the kernels, where they are there and take the dtype."""
        if kernels is not None and takes(self.qkv.weight):
            self._kernels = kernels

    def forward(
        self, hidden: Tensor, norm: RMSNorm, cos_sin: Tensor, backend: AttentionBackend, layout: PagedLayout
    ) -> Tensor:
        num_tokens = hidden.shape[0]
        heads = self.qkv(hidden, norm).view(num_tokens, -1, self._head_dim)  # [T, H + 2 K, D]
        num_rotated = self._num_heads + self._num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        query, key = self._rotate(rotated, cos_sin).tensor_split((self._num_heads,), dim=1)
        # Every row's keys and values, before any row attends: a row may read blocks that another row of this forward
        # fills (see ForwardInput).
        backend.write(key, value, self._layer_index)
        attended = attend_rows(backend, query, self._layer_index, layout)
        return self.out.add_to(hidden, attended.view(num_tokens, -1))

    def _rotate(self, heads: Tensor, cos_sin: Tensor) -> Tensor:
        """heads [T, H + K, D], queries before keys, normed where the model does. May overwrite them."""
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm, self.key_norm)
        if self._kernels is not None:
            weights = None if norms is None else (norms[0].weight, norms[1].weight)
            self._kernels.rotate(heads, self._num_heads, cos_sin, weights, self._norm_eps)
            return heads
        if norms is not None:
            query, key = heads.tensor_split((self._num_heads,), dim=1)
            heads = torch.cat((norms[0](query), norms[1](key)), dim=1)
        return rotate(heads, cos_sin)

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        pieces = self.qkv.weight_pieces(prefix) + self.out.weight_pieces(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            pieces.append(whole(f"{prefix}q_norm.weight", self.query_norm.weight))
            pieces.append(whole(f"{prefix}k_norm.weight", self.key_norm.weight))
        return pieces
