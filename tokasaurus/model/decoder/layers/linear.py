"""Linear layers, sharded over the tensor-parallel ranks and fused where they share an input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice, torch_gemm
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights, takes
from tokasaurus.model.decoder.layers.norm import RMSNorm
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.collectives import sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh

# T tokens


@dataclass(frozen=True, slots=True)
class OutputShard:
    """This rank's range of the output features of one of the fused layers."""

    source: str
    """Name in the checkpoint."""

    size: int
    """Output features in the checkpoint."""

    start: int
    length: int


class Linear(nn.Module):
    """x [T, in] -> [T, out] with weight [out, in].

    On a CPU, call `pack` after loading. It copies the weight into the layout of the kernels, of torch, or of both,
    depending on which is faster for few rows and for many; x may then have another dtype than the weight.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype), requires_grad=False) if bias else None
        self.packed: PackedWeights | None = None
        self._choice = ALWAYS_KERNELS
        self._torch_gemm: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """norm: applied to x first."""
        if self.packed is not None and self.runs_on_kernels(x.shape[0]):
            return self.packed.multiply(x, None if norm is None else (norm.float_weight, norm.eps))
        return self._multiply_by_torch(x if norm is None else norm(x))

    def runs_on_kernels(self, num_rows: int) -> bool:
        """Whether the kernels compute the gemm for this number of rows of x."""
        return self.packed is not None and self._choice.uses_kernels(num_rows)

    def pack(
        self, kernels: LayerKernels | None, choice: GemmChoice = ALWAYS_KERNELS, keep_weight: bool = False
    ) -> None:
        """Pack the weight, and free the plain one.

        kernels: None if there are none. keep_weight: keep the plain weight if the kernels do not pack it, because other
        code, such as the embedding, reads it.
        """
        if self.weight.device.type != "cpu":
            return
        weight, is_taken = self.weight.data, kernels is not None and takes(self.weight)
        if kernels is not None and is_taken and not choice.always_torch:
            self.packed = self._pack(kernels)
            self._choice = choice
        if self.packed is None or not choice.always_kernels:
            dtype = weight.dtype if kernels is None else kernels.activation_dtype(weight.dtype)
            bias = None if self.bias is None else self.bias.data.to(dtype)
            self._torch_gemm = torch_gemm(weight.to(dtype), bias)
        if self.packed is not None or not keep_weight:
            self.weight.data = weight.new_empty(0)

    @property
    def is_packed(self) -> bool:
        """Whether `pack` has copied the weight into another layout."""
        return self.packed is not None or self._torch_gemm is not None

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        if self._torch_gemm is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return functional.linear(x, self.weight.to(x.dtype), bias)
        return self._torch_gemm(x)

    def _pack(self, kernels: LayerKernels) -> PackedWeights:
        return PackedWeights(kernels, self.weight.data, self.bias)


class FusedColumnLinear(Linear):
    """x [T, in] -> [T, sum of lengths]: several layers with one input, fused, each sharded by output features."""

    def __init__(self, in_size: int, outputs: Sequence[OutputShard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_size, sum(output.length for output in outputs), bias, dtype)
        self._in_size = in_size
        self._outputs = tuple(outputs)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = []
        row = 0
        for output in self._outputs:
            features = slice(output.start, output.start + output.length)
            rows = slice(row, row + output.length)
            row += output.length
            name = f"{prefix}{output.source}"
            shape = (output.size, self._in_size)
            shards.append(WeightShard(f"{name}.weight", shape, (features, slice(None)), self.weight[rows]))
            if self.bias is not None:
                shards.append(WeightShard(f"{name}.bias", (output.size,), (features,), self.bias[rows]))
        return shards


class GatedLinear(FusedColumnLinear):
    """x [T, in] -> silu(gate(x)) * up(x), [T, length]. Source: arXiv 2002.05202 (SwiGLU)."""

    def __init__(self, in_size: int, gate: OutputShard, up: OutputShard, dtype: torch.dtype) -> None:
        super().__init__(in_size, (gate, up), bias=False, dtype=dtype)
        self.length = gate.length

    @property
    def is_packed(self) -> bool:
        """Whether `pack` has copied the weight into another layout."""
        return self.packed is not None or self._torch_gemm is not None

    def features(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, 2 * length], the outputs of gate and up, without the kernels."""
        return super()._multiply_by_torch(x)

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        return self.activate(self.features(x))

    @staticmethod
    def activate(gate_up: Tensor) -> Tensor:
        """[T, 2 * length], the outputs of gate and up -> silu(gate) * up, [T, length]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _pack(self, kernels: LayerKernels) -> PackedWeights:
        return PackedWeights(kernels, self.weight.data, None, is_gated=True)


class RowLinear(Linear):
    """x [T, in / tp_size] -> [T, out]: sharded by input features, summed over the ranks."""

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

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        out_size, length = self.weight.shape
        columns = slice(self._start, self._start + length)
        shape = (out_size, self._in_size)
        return [WeightShard(f"{prefix}{self._source}.weight", shape, (slice(None), columns), self.weight)]
