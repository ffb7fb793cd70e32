"""The attention layer: fused projections, optional query/key norms, and rotary."""

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.decoder.layers.linear import FusedColumnLinear, OutputShard, RowLinear
from tokasaurus.model.decoder.layers.norm import RMSNorm
from tokasaurus.model.decoder.layers.rotary import rotate
from tokasaurus.model.decoder.weights import WeightShard, whole
from tokasaurus.model.parallel.mesh import Mesh

# T tokens, E hidden size, H query heads, K key/value heads, D head size


class Attention(nn.Module):
    """x [T, E] -> [T, E]: `project`, attention (see attention/row_split), then `out`.

    layer_index: counted within this pipeline stage, as in the KV cache.
    """

    def __init__(
        self, info: ModelInfo, mesh: Mesh, layer_index: int, qkv_bias: bool, qk_norm: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self._head_dim = info.head_dim
        head_start, self.num_heads = mesh.shard(info.num_heads, "attention heads")
        kv_start, self.num_kv_heads = mesh.kv_head_shard(info.num_kv_heads)
        query_size = info.num_heads * info.head_dim
        query_shard = (head_start * info.head_dim, self.num_heads * info.head_dim)
        kv_size = info.num_kv_heads * info.head_dim
        kv_shard = (kv_start * info.head_dim, self.num_kv_heads * info.head_dim)
        outputs = [
            OutputShard("q_proj", query_size, *query_shard),
            OutputShard("k_proj", kv_size, *kv_shard),
            OutputShard("v_proj", kv_size, *kv_shard),
        ]
        self.qkv = FusedColumnLinear(info.hidden_size, outputs, qkv_bias, dtype)
        self.out = RowLinear("o_proj", query_size, query_shard, info.hidden_size, mesh, dtype)
        self.query_norm = RMSNorm(info.head_dim, info.norm_eps, dtype) if qk_norm else None
        self.key_norm = RMSNorm(info.head_dim, info.norm_eps, dtype) if qk_norm else None

    def project(self, x: Tensor, norm: RMSNorm, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E], normalised by `norm` -> query [T, H, D], key and value [T, K, D]; query and key are rotated."""
        return self.split_heads(self.heads(self.qkv(x, norm)), cos_sin)

    def heads(self, features: Tensor) -> Tensor:
        """[..., (H + 2K) * D] -> [..., H + 2K, D]: the features of all heads, by head."""
        return torch.unflatten(features, -1, (-1, self._head_dim))

    def split_heads(self, heads: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, H + 2K, D] -> query [T, H, D], key and value [T, K, D]; query and key are rotated."""
        num_rotated = self.num_heads + self.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        rotated = rotate(rotated, cos_sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], value

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = self.qkv.weight_shards(prefix) + self.out.weight_shards(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            shards.append(whole(f"{prefix}q_norm.weight", self.query_norm.weight))
            shards.append(whole(f"{prefix}k_norm.weight", self.key_norm.weight))
        return shards
