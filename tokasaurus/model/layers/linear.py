"""Matrix products whose weights are cut over the tensor-parallel ranks and fused where they share an input."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.tensor_parallel import sum_over_shards
from tokasaurus.model.weights import WeightPiece

# T tokens


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One of the fused products: `size` output features in the checkpoint, of which this rank computes a range."""

    source: str
    size: int
    start: int
    length: int


class Linear(nn.Module):
    """x [T, in] -> [T, out] with weight [out, in]. After loading, `pack` puts the weight into the layout that the CPU's
    matrix library works in; otherwise it would be rearranged in every call."""

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def pack(self, keep_weight: bool = False) -> None:
        """Only bfloat16 on a CPU gains. keep_weight: the plain weight is read by others and stays."""
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.bfloat16 or not _onednn_packs():
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACK_ROWS)
        if not keep_weight:
            self.weight.data = self.weight.data.new_empty(0)


_PACK_ROWS = 64
"""Rows of x that the layout is chosen for; measured as fast as any other for 1 to 512."""


def _onednn_packs() -> bool:
    """Whether oneDNN is there and multiplies bfloat16 on this processor: it refuses to pack where it does not."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class FusedColumnLinear(Linear):
    """x [T, in] -> [T, sum of lengths]: several products of one input as one, each cut by output features."""

    def __init__(self, in_size: int, outputs: Sequence[OutputShard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_size, sum(output.length for output in outputs), bias, dtype)
        self._in_size = in_size
        self._outputs = tuple(outputs)

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


class RowLinear(Linear):
    """x [T, in / tp_size] -> [T, out]: cut by input features, summed over the ranks."""

    def __init__(
        self, source: str, in_size: int, shard: tuple[int, int], out_size: int, mesh: Mesh, dtype: torch.dtype
    ):
        super().__init__(shard[1], out_size, bias=False, dtype=dtype)
        self._source = source
        self._in_size = in_size
        self._start = shard[0]
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_shards(super().forward(x), self._mesh)

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        out_size, length = self.weight.shape
        columns = slice(self._start, self._start + length)
        shape = (out_size, self._in_size)
        return [WeightPiece(f"{prefix}{self._source}.weight", shape, (slice(None), columns), self.weight)]
