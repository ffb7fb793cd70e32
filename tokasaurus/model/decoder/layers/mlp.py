"""The gated feed-forward layer."""

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.decoder.layers.linear import GatedLinear, OutputShard, RowLinear
from tokasaurus.model.decoder.layers.norm import RMSNorm
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.mesh import Mesh


class GatedMLP(nn.Module):
    """x [T, E] -> [T, E]: down(silu(gate(x)) * up(x)). Source: arXiv 2002.05202 (SwiGLU)."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        size = info.intermediate_size
        start, length = mesh.shard(size, "intermediate_size")
        gate, up = (OutputShard(name, size, start, length) for name in ("gate_proj", "up_proj"))
        self.gate_up = GatedLinear(info.hidden_size, gate, up, dtype)
        self.down = RowLinear("down_proj", size, (start, length), info.hidden_size, mesh, dtype)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """norm: applied to x first."""
        down: Tensor = self.down(self.gate_up(x, norm))
        return down

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        return self.gate_up.weight_shards(prefix) + self.down.weight_shards(prefix)
