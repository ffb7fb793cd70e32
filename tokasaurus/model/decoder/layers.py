"""The layers that a decoder is made of, as torch modules: norms, linear layers, the feed-forward, embedding and
LM head. All are sharded over the tensor-parallel ranks, and fused where they share an input. Attention is in `decoder`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import Activation, MLPSpec, NormSpec
from tokasaurus.model.cpu.bindings import HugePageTensors
from tokasaurus.model.cpu.experts import ExpertWeights
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice, TorchGemm
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedNorm, PackedWeights, takes
from tokasaurus.model.cpu.low_rank import LowRankRows, PackedAdapters, PackedLowRank
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.quantize import Packing, quantized
from tokasaurus.model.decoder.row_adapters import LowRankSlots, RowAdapters
from tokasaurus.model.decoder.weights import WeightShard, whole
from tokasaurus.model.parallel.collectives import sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh

PLAIN = Packing()
"""Plain weights stay plain, and quantised ones are widened."""

# T tokens, R rows whose logits are wanted, E hidden size


class Norm(nn.Module):
    """Normalises x [..., size], then scales it by a weight per channel and adds a bias, where the spec has them.
    Sources: arXiv 1910.07467 (RMS), 1607.06450 (layer)."""

    def __init__(self, spec: NormSpec, size: int, dtype: torch.dtype, num_heads: int | None = None) -> None:
        """num_heads: x is [..., num_heads, size], and each head has its own weights; None: all have the same."""
        super().__init__()
        self._spec = spec
        self._is_plain = spec.is_plain and num_heads is None
        self.eps = spec.eps
        self._size = size
        self._shape = (size,) if num_heads is None else (num_heads, size)
        dtype = torch.float32 if spec.in_float32 else dtype
        self.weight, self.bias = (
            nn.Parameter(torch.empty(prod(self._shape), dtype=dtype), requires_grad=False) if is_there else None
            for is_there in (spec.has_weight, spec.has_bias)
        )
        self._packed: PackedNorm | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._is_plain:
            return functional.rms_norm(x, (self._size,), self.own_weight.to(x.dtype), self.eps)
        numbers = x.float()
        normalise = functional.rms_norm if self._spec.kind == "rms" else functional.layer_norm
        numbers = normalise(numbers, (self._size,), eps=self.eps)
        if self.weight is not None:
            numbers = numbers * self.weight.float().view(self._shape)
        if self.bias is not None:
            numbers = numbers + self.bias.float().view(self._shape)
        return numbers.to(x.dtype)

    def write(self, values: Tensor) -> None:
        """Replace the weight. values [size]."""
        self.own_weight.data.copy_(values)
        if self._packed is not None:
            self._packed.write(self.own_weight.data, None)

    def write_bias(self, values: Tensor) -> None:
        """Replace the bias. values [size]."""
        assert self.bias is not None
        self.bias.data.copy_(values)
        if self._packed is not None:
            self._packed.write(None, self.bias.data)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Of a norm that every rank has."""
        shards = []
        if self.weight is not None:
            shards.append(whole(f"{prefix}.weight", self.weight, self.write))
        if self.bias is not None:
            shards.append(whole(f"{prefix}.bias", self.bias, self.write_bias))
        return shards

    @property
    def own_weight(self) -> Tensor:
        """The weight of a norm that has one."""
        assert self.weight is not None
        return self.weight

    @property
    def packed(self) -> PackedNorm:
        """The loaded norm as the CPU kernels read it; created at the first call."""
        if self._packed is None:
            vectors = (None if vector is None else vector.data for vector in (self.weight, self.bias))
            self._packed = PackedNorm(self._spec, *vectors)
        return self._packed


@dataclass(frozen=True, slots=True)
class OutputShard:
    """This rank's range of the output features of one of the fused layers."""

    source: str
    """Name in the checkpoint."""

    size: int
    """Output features in the checkpoint."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """What an adapter adds to the outputs of a linear layer."""

    parts: tuple[LowRankRows, ...]
    """On the host, for torch; none where torch never multiplies by the weight."""
    packed: PackedLowRank | None
    """For the kernels, where these do."""


class Linear(nn.Module):
    """x [T, in] -> [T, out] with weight [out, in].

    On a CPU, call `pack` after loading. It copies the weight into the layout of the kernels, of torch, or of both,
    depending on which is faster for few rows and for many; x may then have another dtype than the weight.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype), requires_grad=False) if bias else None
        self.packed: PackedWeights | ExpertWeights | None = None
        self._choice = ALWAYS_KERNELS
        self._is_always_packed = True
        self._torch_gemm: TorchGemm | None = None
        self._blocks: dict[int, BlockRows] = {}
        """Quantised rows by the number of the first one, until they are packed."""
        self.dequantised_types: list[str] = []
        """Types of the weights whose blocks could not be packed."""
        self._quantization: str | None = None
        """What plain weights are quantised to, as in Packing."""
        self._row_adapters: RowAdapters | None = None
        self._low_rank: dict[int, Sequence[LowRankRows]] = {}
        """Of adapters by number, for torch."""
        self._low_rank_slots: LowRankSlots | None = None
        """The adapters for Triton kernels, where these add to the outputs."""
        self.packed_adapters: PackedAdapters | None = None
        """The adapters for the kernels, if these multiply by the weight, and there are adapters."""

    def take_blocks(self, first_row: int, rows: BlockRows) -> None:
        """Keep blocks for the weight's rows from `first_row` on, in place of filling these. `pack` reads `rows` later,
        and packs them as they are."""
        self._blocks[first_row] = rows

    @property
    def has_blocks(self) -> bool:
        """Whether rows of the weight have come as blocks, which are not packed yet."""
        return bool(self._blocks)

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """norm: applied to x first."""
        if self.packed_whole is not None and self.runs_on_kernels(x.shape[0]):
            normed = None if norm is None else norm.packed
            return self.packed_whole.multiply(x, normed, adapters=self.adapters_of_rows)
        return self._multiply_by_torch(x if norm is None else norm(x))

    def use_adapters(self, row_adapters: RowAdapters, parts: Sequence[tuple[int, int]] = ()) -> None:
        """From now on, adapters may add to the outputs. row_adapters: says of which rows. parts: of the weight, as in
        LowRankSlots, if Triton kernels are to add. Call after `pack`."""
        self._row_adapters, self._low_rank_slots = row_adapters, None
        if row_adapters.tiled is not None and parts:
            self._low_rank_slots = LowRankSlots(row_adapters.tiled, parts, self.weight.data)
        if self.packed_whole is not None:
            self.packed_adapters = PackedAdapters(self.packed_whole, self.weight.dtype, row_adapters.num_adapters)

    def prepare_adapter(self, parts: Sequence[LowRankRows], memory: HugePageTensors) -> LinearAdapter:
        """An adapter that is made of these parts, none of whose outputs overlap. memory: for what the kernels read."""
        packed = None if self.packed_adapters is None else self.packed_adapters.pack(parts, memory)
        return LinearAdapter(() if packed is not None and self._is_always_packed else tuple(parts), packed)

    def place_adapter(self, number: int, adapter: LinearAdapter | None) -> None:
        """The adapter of this number from now on; None adds nothing."""
        if self.packed_adapters is not None:
            self.packed_adapters.place(number, None if adapter is None else adapter.packed)
        if self._low_rank_slots is not None:
            self._low_rank_slots.place(number, () if adapter is None else adapter.parts)
            return
        self._low_rank.pop(number, None)
        if adapter is not None:
            parts = ((part.first_row, part.down.to(self.weight), part.up.to(self.weight)) for part in adapter.parts)
            self._low_rank[number] = [LowRankRows(*part) for part in parts]

    @property
    def adapters_of_rows(self) -> tuple[int, Tensor] | None:
        """As PackedWeights.multiply wants them."""
        if self._row_adapters is None or self._row_adapters.numbers is None or self.packed_adapters is None:
            return None
        return self.packed_adapters.address, self._row_adapters.numbers

    @property
    def packed_whole(self) -> PackedWeights | None:
        """Packed for the kernels, if it is a single layer."""
        return self.packed if isinstance(self.packed, PackedWeights) else None

    def runs_on_kernels(self, num_rows: int) -> bool:
        """Whether the kernels compute the gemm for this number of rows of x."""
        return self.packed is not None and (self._is_always_packed or self._choice.uses_kernels(num_rows))

    def pack(
        self,
        kernels: LayerKernels | None,
        choice: GemmChoice = ALWAYS_KERNELS,
        keep_weight: bool = False,
        packing: Packing = PLAIN,
    ) -> None:
        """Pack the weight, and free the plain one.

        kernels: None if there are none. keep_weight: keep the plain weight if the kernels do not pack it, because other
        code, such as the embedding, reads it. Raises CannotQuantize.
        """
        if self.weight.device.type != "cpu":
            return
        weight = self.weight.data
        by_kernels = kernels if takes(self.weight) and not choice.always_torch else None
        if packing.quantization is not None:
            assert not self._blocks, "the weights are plain"
            self._blocks[0] = quantized(weight, packing.quantization)
            assert by_kernels is not None, "the start refuses what the kernels do not multiply by"
            self._quantization = packing.quantization
        blocks = None if by_kernels is None else self._whole_blocks(by_kernels, packing.is_int8)
        if blocks is None:
            self.dequantised_types = [rows.type for rows in self._blocks.values()]
        if blocks is None or not choice.always_kernels:
            self._fill_from_blocks()
        if by_kernels is not None:
            self.packed = self._pack(by_kernels, blocks or weight)
            self._choice, self._is_always_packed = choice, choice.always_kernels
        if self.packed is None or not choice.always_kernels:
            dtype = weight.dtype if kernels is None else kernels.activation_dtype(weight.dtype)
            bias = None if self.bias is None else self.bias.data.to(dtype)
            self._torch_gemm = TorchGemm(weight.to(dtype), bias)
        if self.packed is not None or not keep_weight:
            self.weight.data = weight.new_empty(0)
        self._blocks.clear()

    def dequantise_blocks(self) -> None:
        """Fill the rows of the weight that have come as blocks."""
        self.dequantised_types = [rows.type for rows in self._blocks.values()]
        self._fill_from_blocks()
        self._blocks.clear()

    def _fill_from_blocks(self) -> None:
        for first_row, rows in self._blocks.items():
            self.weight.data[first_row : first_row + len(rows.blocks)] = rows.dequantized()

    def _whole_blocks(self, kernels: LayerKernels, is_int8: bool) -> BlockWeight | None:
        """The weight, if all of it has come as blocks that fit into panels."""
        num_rows, in_size = self.weight.shape
        parts = tuple(self._blocks[first_row] for first_row in sorted(self._blocks))
        blocks = BlockWeight(in_size, self.weight.dtype, parts, is_int8)
        return blocks if blocks.num_rows == num_rows and self._fits(blocks, kernels) else None

    def write_weight(self, first_row: int, rows: Tensor) -> None:
        """Replace the weight's rows from `first_row` on, in each layout that it has. rows [n, in], in any dtype."""
        rows = rows.to(self.weight.dtype)
        blocks = None if self._quantization is None else quantized(rows, self._quantization)
        if blocks is not None:
            rows = blocks.dequantized().to(self.weight.dtype)
        if self.weight.numel():
            self.weight.data[first_row : first_row + len(rows)] = rows
        if self.packed is not None and blocks is not None:
            self.packed.write_blocks(first_row, blocks)
        elif self.packed is not None:
            self.packed.write(first_row, rows)
        if self._torch_gemm is not None:
            self._torch_gemm.write(first_row, rows)

    def write_bias(self, first: int, values: Tensor) -> None:
        """Replace the bias from output `first` on. values [n], in any dtype."""
        assert self.bias is not None
        self.bias.data[first : first + len(values)] = values
        if self.packed is not None:
            self.packed.write_bias(first, self.bias.data[first : first + len(values)])
        if self._torch_gemm is not None:
            self._torch_gemm.write_bias(first, self.bias.data[first : first + len(values)])

    def give_back(self) -> None:
        """Return the memory of the weight's layouts to the system, until `take_again`. Not of the plain weight."""
        if self.packed is not None:
            self.packed.give_back()
        if self._torch_gemm is not None:
            self._torch_gemm.give_back()

    def take_again(self) -> None:
        """The weight has its layouts again, with unspecified numbers."""
        if self._torch_gemm is not None:
            self._torch_gemm.take_again()

    @property
    def saved_bytes(self) -> int:
        """What a quantised weight takes less than one of its dtype; below 0 where torch has a plain one beside it."""
        if self.packed is None or not self.packed.has_blocks:
            return 0
        plain_bytes = self.packed.num_weights * self.weight.itemsize if self._torch_gemm is None else 0
        return plain_bytes - self.packed.num_bytes

    @property
    def is_packed(self) -> bool:
        """Whether `pack` has copied the weight into another layout."""
        return self.packed is not None or self._torch_gemm is not None

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        if self._torch_gemm is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            out = functional.linear(x, self.weight.to(x.dtype), bias)
        else:
            out = self._torch_gemm(x)
        rows = self._row_adapters
        if rows is None:
            return out
        if self._low_rank_slots is None:
            return rows.added(out, x, self._low_rank)
        if rows.adds_in_kernels:
            self._low_rank_slots.add(out, x)
        return out

    def _pack(self, kernels: LayerKernels, weight: Tensor | BlockWeight) -> PackedWeights | ExpertWeights:
        return PackedWeights(kernels, weight, self.bias)

    def _fits(self, weight: BlockWeight, kernels: LayerKernels) -> bool:
        return PackedWeights.fits(weight, kernels.panel_size)


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
            functions = partial(self.write_weight, rows.start), partial(self.take_blocks, rows.start)
            place = f"{name}.weight", shape, (features, slice(None)), self.weight[rows]
            shards.append(WeightShard(*place, *functions, linear=(self, rows.start)))
            if self.bias is not None:
                write = partial(self.write_bias, rows.start)
                shards.append(WeightShard(f"{name}.bias", (output.size,), (features,), self.bias[rows], write))
        return shards


class ActivatedLinear(FusedColumnLinear):
    """x [T, in] -> activation(gate(x)) * up(x), or activation(up(x)), [T, length]. Source: arXiv 2002.05202.

    An activation with weights is left to the MLP."""

    def __init__(self, in_size: int, spec: MLPSpec, start: int, length: int, dtype: torch.dtype) -> None:
        """Of the outputs, `length` from `start` on."""
        names = ("gate_proj", "up_proj") if spec.is_gated else ("up_proj",)
        super().__init__(
            in_size, [OutputShard(name, spec.width, start, length) for name in names], spec.has_bias, dtype
        )
        self.length = length
        self._spec = spec

    def features(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, 2 * length], the outputs of gate and up, or those of up, without the kernels."""
        return super()._multiply_by_torch(x)

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        return self.activate(self.features(x))

    def activate(self, features: Tensor) -> Tensor:
        """What `features` gives -> [T, length]."""
        return activated(features, self._spec)

    def _pack(self, kernels: LayerKernels, weight: Tensor | BlockWeight) -> PackedWeights:
        activation = None if self._spec.activation == "xielu" else self._spec.activation
        return PackedWeights(kernels, weight, self.bias, self._spec.is_gated, activation, self._spec.gate_limits)

    def _fits(self, weight: BlockWeight, kernels: LayerKernels) -> bool:
        return PackedWeights.fits(weight, kernels.panel_size, self._spec.is_gated)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


def activated(features: Tensor, spec: MLPSpec) -> Tensor:
    """Gates and ups [T, 2 W], or ups [T, W] -> [T, W]. An activation with weights is left to the MLP."""
    function: Callable[[Tensor], Tensor] = ACTIVATIONS.get(spec.activation, lambda x: x)
    if not spec.is_gated:
        return function(features)
    gate, up = features.chunk(2, dim=-1)
    limits = spec.gate_limits
    if limits is None:
        return function(gate) * up
    gate, up = gate.clamp(max=limits.limit), up.clamp(-limits.limit, limits.limit)
    return gate * torch.sigmoid(limits.alpha * gate) * (up + limits.up_offset)


class RowLinear(Linear):
    """x [T, in / tp_size] -> [T, out]: sharded by input features, summed over the ranks. The first one has the bias."""

    def __init__(
        self,
        source: str,
        in_size: int,
        shard: tuple[int, int],
        out_size: int,
        mesh: Mesh,
        dtype: torch.dtype,
        bias: bool = False,
    ):
        super().__init__(shard[1], out_size, bias and mesh.tp_rank == 0, dtype)
        self._has_bias = bias
        self._source = source
        self._in_size, self._out_size = in_size, out_size
        self._columns = slice(shard[0], sum(shard))
        self._mesh = mesh

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return sum_over_shards(super().forward(x, norm), self._mesh)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        source, shape = f"{prefix}{self._source}.weight", (self._out_size, self._in_size)
        functions = partial(self.write_weight, 0), partial(self.take_blocks, 0)
        place = source, shape, (slice(None), self._columns), self.weight
        shards = [WeightShard(*place, *functions, linear=(self, 0))]
        if self.bias is not None:
            shards.append(whole(f"{prefix}{self._source}.bias", self.bias, partial(self.write_bias, 0)))
        elif self._has_bias:
            shards.append(WeightShard(f"{prefix}{self._source}.bias", (self._out_size,), (), None))
        return shards


class MLP(nn.Module):
    """x [T, E] -> [T, E]: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, spec: MLPSpec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        start, length = mesh.shard(spec.width, "intermediate_size")
        assert spec.activation != "xielu" or not spec.is_gated, "no model gates it"
        self.gate_up = ActivatedLinear(hidden_size, spec, start, length, dtype)
        self.xielu = XIELU() if spec.activation == "xielu" else None
        """Applied to what gate_up gives, which no activation was applied to."""
        self.down = RowLinear("down_proj", spec.width, (start, length), hidden_size, mesh, dtype, spec.has_bias)

    @property
    def packed(self) -> tuple[PackedWeights, PackedWeights] | None:
        """gate_up and down, if both are packed for the kernels."""
        first, last = self.gate_up.packed_whole, self.down.packed_whole
        return None if first is None or last is None else (first, last)

    def forward(self, x: Tensor, norm: Norm | None) -> Tensor:
        """norm: applied to x first."""
        features = self.gate_up(x, norm)
        down: Tensor = self.down(features if self.xielu is None else self.xielu(features))
        return down

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        own = [] if self.xielu is None else self.xielu.weight_shards(f"{prefix}act_fn.")
        return self.gate_up.weight_shards(prefix) + self.down.weight_shards(prefix) + own


class XIELU(nn.Module):
    """x -> alpha_p x^2 + beta x for x > 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x. Source: arXiv 2411.13010."""

    _NAMES = ("alpha_p", "alpha_n", "beta", "eps")

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.empty(4, dtype=torch.float32), requires_grad=False)
        """As they are stored; the alphas are softplus of theirs, and alpha_n is beta larger."""

    def forward(self, x: Tensor) -> Tensor:
        stored_p, stored_n, beta, eps = self.numbers
        alpha_p, alpha_n = functional.softplus(stored_p), beta + functional.softplus(stored_n)
        number = x.float()
        negative = alpha_n * (torch.expm1(torch.minimum(number, eps)) - number)
        result: Tensor = torch.where(number > 0, alpha_p * number * number, negative) + beta * number
        return result.to(x.dtype)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = []
        for index, name in enumerate(self._NAMES):
            shape = (1,) if name.startswith("alpha") else ()
            own, write = self.numbers[index : index + 1], partial(self._write, index)
            everything = tuple(slice(None) for _ in shape)
            shards.append(WeightShard(f"{prefix}{name}", shape, everything, own, write))
        return shards

    def _write(self, index: int, value: Tensor) -> None:
        self.numbers.data[index] = value.item()


def rows_of_ranks(own: tuple[int, int], mesh: Mesh, look_up: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
    """token_ids [..., T] -> rows of an embedding, [..., T, E]. own: (start, length) of this rank's token ids, which
    look_up finds from 0 on."""
    local = token_ids - own[0]
    elsewhere = (local < 0) | (local >= own[1])
    rows = look_up(local.masked_fill(elsewhere, 0))
    return sum_over_shards(rows.masked_fill(elsewhere.unsqueeze(-1), 0), mesh)


@dataclass(frozen=True, slots=True)
class VocabAdapter:
    """What an adapter has in place of an embedding or an LM head, or adds to an embedding's rows."""

    whole: Tensor | None = None
    """[vocab, E], in its place."""
    factors: tuple[Tensor, Tensor] | None = None
    """float32 [vocab, ranks] and [ranks, E], whose product is added to an embedding; the scale is in the second."""

    def rows(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """rows [n, E] of the embedding of token_ids [n] -> the adapter's."""
        if self.whole is not None:
            return self.whole[token_ids].to(rows.dtype)
        assert self.factors is not None
        return (rows.float() + self.factors[0][token_ids] @ self.factors[1]).to(rows.dtype)

    def to(self, device: torch.device) -> "VocabAdapter":
        """The same on a device."""
        whole = None if self.whole is None else self.whole.to(device)
        factors = None if self.factors is None else (self.factors[0].to(device), self.factors[1].to(device))
        return VocabAdapter(whole, factors)


class VocabShard(Linear):
    """Rows of a [vocab, E] matrix for this rank's range of token ids; serves as embedding, as LM head, or as both."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype, bias: bool = False) -> None:
        """bias: of logits; rows of an embedding have none."""
        start, length = mesh.vocab_shard(info.vocab_size)
        super().__init__(info.hidden_size, length, bias, dtype)
        self._start = start
        self._length = length
        self._mesh = mesh
        self._shape = (info.vocab_size, info.hidden_size)
        self._spec = info.spec
        self._logits: Tensor | None = None
        self._product: Callable[[Linear, Tensor, Norm], Tensor] = Linear.__call__
        self._embeddings: dict[int, VocabAdapter] = {}
        self._heads: dict[int, VocabAdapter] = {}
        """Of adapters by number."""

    @property
    def tokens(self) -> slice:
        """This rank's token ids."""
        return slice(self._start, self._start + self._length)

    def place_vocab(self, number: int, embedding: VocabAdapter | None, head: VocabAdapter | None) -> None:
        """What the adapter of this number has in place of, or adds to, what this serves as; None: nothing."""
        for adapters, adapter in ((self._embeddings, embedding), (self._heads, head)):
            adapters.pop(number, None)
            if adapter is not None:
                adapters[number] = adapter.to(self.weight.device)

    def compile_product(self, compiler: Compiler) -> None:
        """Compile norm and gemm, for any number of rows, unless they have been packed."""
        if not self.is_packed:
            self._product = compiler.compile(Linear.forward)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, E]."""
        if self._mesh.tp_size == 1:
            rows = self._rows(token_ids)
        else:
            rows = rows_of_ranks((self._start, self._length), self._mesh, self._rows, token_ids)
        for adapter, chosen in self._rows_with(self._embeddings):
            rows[chosen] = adapter.rows(rows[chosen], token_ids[chosen])
        return rows

    @property
    def _has_adapters(self) -> bool:
        """Whether any of the current rows has one: what is compiled knows of none."""
        return self._row_adapters is not None and self._row_adapters.numbers is not None

    def _rows_with(self, adapters: Mapping[int, VocabAdapter]) -> Iterator[tuple[VocabAdapter, Tensor]]:
        """Each of `adapters` that current rows have, and the indices of these rows."""
        if self._row_adapters is not None and adapters:
            for number, rows in self._row_adapters.rows():
                if number in adapters:
                    yield adapters[number], rows

    def _rows(self, indices: Tensor) -> Tensor:
        return (
            functional.embedding(indices, self.weight) if self.packed_whole is None else self.packed_whole.rows(indices)
        )

    def reserve(self, num_rows: int) -> None:
        """Allocate memory for num_rows rows of logits, if the kernels compute them."""
        if self.packed_whole is not None:
            self._logits = torch.zeros((num_rows, self._length), dtype=self.packed_whole.activation_dtype)

    def logits(self, hidden: Tensor, norm: Norm) -> Tensor:
        """hidden [R, E], normalised by `norm` -> logits of this rank's token ids, [R, v], in its dtype. The next
        call may overwrite them."""
        scale, softcap = self._spec.logit_scale, self._spec.logit_softcap
        if self.packed_whole is not None and self.runs_on_kernels(hidden.shape[0]):
            places = norm.packed, self.logits_memory(len(hidden))
            logits = self.packed_whole.multiply(hidden, *places, scale, softcap, self.adapters_of_rows)
        else:
            product = Linear.__call__ if self._has_adapters else self._product
            logits = self._scaled(product(self, hidden, norm))
        for adapter, chosen in self._rows_with(self._heads):
            assert adapter.whole is not None
            own = adapter.whole[self.tokens].to(hidden.dtype)
            logits[chosen] = self._scaled(functional.linear(norm(hidden[chosen]), own, self.bias))
        return logits

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, softcap = self._spec.logit_scale, self._spec.logit_softcap
        if scale != 1:
            logits = logits * scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def logits_memory(self, num_rows: int) -> Tensor:
        """Memory for the kernels' logits, [R, v], in the activation dtype. Calls share it."""
        # Keep it: an allocation of this size would go back to the system when freed, and allocating it again, zeroed
        # and page by page, would take a quarter of the gemm's time.
        assert self.packed_whole is not None
        if self._logits is None or len(self._logits) < num_rows:
            self._logits = torch.empty((num_rows, self._length), dtype=self.packed_whole.activation_dtype)
        return self._logits[:num_rows]

    def weight_shards(self, source: str) -> list[WeightShard]:
        functions = partial(self.write_weight, 0), partial(self.take_blocks, 0)
        place = source, self._shape, (self.tokens, slice(None)), self.weight
        return [WeightShard(*place, *functions, linear=(self, 0))]

    def bias_shards(self, source: str) -> list[WeightShard]:
        if self.bias is None:
            return []
        return [WeightShard(source, self._shape[:1], (self.tokens,), self.bias, partial(self.write_bias, 0))]
