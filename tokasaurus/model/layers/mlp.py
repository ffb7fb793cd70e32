"""The gated feed-forward layer."""

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.layers.linear import GatedLinear, OutputShard, RowLinear
from tokasaurus.model.layers.norm import RMSNorm
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.weights import WeightPiece


class GatedMLP(nn.Module):
    """hidden [T, E] -> hidden + down(silu(gate(x)) * up(x)), with x = norm(hidden). May overwrite hidden."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        size = info.intermediate_size
        start, length = mesh.shard(size, "intermediate_size")
        gate, up = (OutputShard(name, size, start, length) for name in ("gate_proj", "up_proj"))
        self.gate_up = GatedLinear(info.hidden_size, gate, up, dtype)
        self.down = RowLinear("down_proj", size, (start, length), info.hidden_size, mesh, dtype)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        return self.down.add_to(hidden, self.gate_up(hidden, norm))

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        return self.gate_up.weight_pieces(prefix) + self.down.weight_pieces(prefix)
