"""Matrix products whose weights are cut over the tensor-parallel ranks and fused where they share an input."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.tensor_parallel import sum_over_shards
from tokasaurus.model.weights import WeightPiece


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One of the fused products: `size` output features in the checkpoint, of which this rank computes a range."""

    source: str
    size: int
    start: int
    length: int


class FusedColumnLinear(nn.Module):
    """x [T, in] -> [T, sum of lengths]: several products of one input as one, each cut by output features."""

    def __init__(self, in_size: int, outputs: Sequence[OutputShard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._in_size = in_size
        self._outputs = tuple(outputs)
        total = sum(output.length for output in outputs)
        self.weight = nn.Parameter(torch.empty(total, in_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        pieces = []
        row = 0
        for output in self._outputs:
            shard = slice(output.start, output.start + output.length)
            rows = slice(row, row + output.length)
            row += output.length
            name = f"{prefix}{output.source}"
            shape = (output.size, self._in_size)
            pieces.append(WeightPiece(f"{name}.weight", shape, (shard, slice(None)), self.weight[rows]))
            if self.bias is not None:
                pieces.append(WeightPiece(f"{name}.bias", (output.size,), (shard,), self.bias[rows]))
        return pieces


class RowLinear(nn.Module):
    """x [T, in / tp_size] -> [T, out]: cut by input features, summed over the ranks."""

    def __init__(
        self, source: str, in_size: int, shard: tuple[int, int], out_size: int, mesh: Mesh, dtype: torch.dtype
    ):
        super().__init__()
        self._source = source
        self._in_size = in_size
        self._start, length = shard
        self._mesh = mesh
        self.weight = nn.Parameter(torch.empty(out_size, length, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_shards(functional.linear(x, self.weight), self._mesh)

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        out_size, length = self.weight.shape
        columns = slice(self._start, self._start + length)
        shape = (out_size, self._in_size)
        return [WeightPiece(f"{prefix}{self._source}.weight", shape, (slice(None), columns), self.weight)]
