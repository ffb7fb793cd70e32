"""Matrix products whose weights are cut over the tensor-parallel ranks and fused where they share an input."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.model.kernels.layer_kernels import LayerKernels, PackedWeights, takes
from tokasaurus.model.layers.norm import RMSNorm
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
    kernels or matrix library work in; otherwise it would be rearranged in every call, or read at half speed."""

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype), requires_grad=False) if bias else None
        self.packed: PackedWeights | None = None
        self._onednn_packed: Tensor | None = None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """norm: applied to x first."""
        if self.packed is not None:
            return self.packed.multiply(x, None if norm is None else (norm.weight, norm.eps))
        if norm is not None:
            x = norm(x)
        if self._onednn_packed is None:
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._onednn_packed, self.bias, "none", [], "")
        return out

    def pack(self, kernels: LayerKernels | None, keep_weight: bool = False) -> None:
        """kernels: None where they are not built. keep_weight: others read the plain weight, so that it stays where
        they cannot read the packed one. Without kernels, only bfloat16 on a CPU gains."""
        if kernels is not None and takes(self.weight):
            self.packed = self._pack(kernels)
        elif self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and _onednn_packs():
            self._onednn_packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACK_ROWS)
            if keep_weight:
                return
        else:
            return
        self.weight.data = self.weight.data.new_empty(0)

    def _pack(self, kernels: LayerKernels) -> PackedWeights:
        return PackedWeights(kernels, self.weight.data, self.bias)


_PACK_ROWS = 64
"""Rows of x that oneDNN's layout is chosen for; measured as fast as any other for 1 to 512."""


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


class GatedLinear(FusedColumnLinear):
    """x [T, in] -> silu(gate(x)) * up(x), [T, length]. Source: arXiv 2002.05202 (SwiGLU)."""

    def __init__(self, in_size: int, gate: OutputShard, up: OutputShard, dtype: torch.dtype) -> None:
        super().__init__(in_size, (gate, up), bias=False, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        product = super().forward(x, norm)
        if self.packed is not None:
            return product
        gate, up = product.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _pack(self, kernels: LayerKernels) -> PackedWeights:
        return PackedWeights(kernels, self.weight.data, None, is_gated=True)


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

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return sum_over_shards(super().forward(x, norm), self._mesh)

    def weight_pieces(self, prefix: str) -> list[WeightPiece]:
        out_size, length = self.weight.shape
        columns = slice(self._start, self._start + length)
        shape = (out_size, self._in_size)
        return [WeightPiece(f"{prefix}{self._source}.weight", shape, (slice(None), columns), self.weight)]
