"""Layers with a state of fixed size: Gated DeltaNet, short convolutions, Mamba 2. Each is two linear layers, and what
moves its state on between them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.checkpoint.spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, StateSpec
from tokasaurus.model.cpu.states import PackedState, StateKernels
from tokasaurus.model.decoder.layers import FusedColumnLinear, Norm, OutputShard, RowLinear
from tokasaurus.model.decoder.state_math import Rows, convolve, recur
from tokasaurus.model.decoder.state_rows import Segments, StateRows, mixed_by_operation
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.collectives import sum_in_float32
from tokasaurus.model.parallel.mesh import Mesh

# T tokens, E hidden size, F features, W numbers that enter the last linear layer, H heads

_LENGTH_EPS = 1e-6
"""Of the lengths by which Gated DeltaNet divides queries and keys."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things that the first linear layer gives, with this rank's share of it."""

    name: str
    size: int
    start: int
    length: int
    is_convolved: bool = False


class StateLayer(nn.Module, ABC):
    """x [T, E] -> [T, E]. Vectors and the convolution are of float32, whatever the model's dtype, as the states are."""

    def __init__(
        self,
        spec: StateSpec,
        parts: Sequence[Part],
        width: tuple[int, tuple[int, int]],
        hidden_size: int,
        mesh: Mesh,
        dtype: torch.dtype,
        vectors: Mapping[str, tuple[int, slice]],
        biases: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        """width: numbers that enter the last linear layer, on all ranks; this rank's (start, length). vectors: whole
        size and this rank's part of each by its name. biases: of the first linear layer, the convolution, the last."""
        super().__init__()
        self._state = spec
        outputs = [OutputShard(f"{part.name}_proj", part.size, part.start, part.length) for part in parts]
        self.inputs = FusedColumnLinear(hidden_size, outputs, biases[0], dtype)
        self.out = RowLinear("out_proj", width[0], width[1], hidden_size, mesh, dtype, biases[2])
        self._convolved = [part for part in parts if part.is_convolved]
        self._width, self._conv_size = width[1][1], spec.conv_size
        self.num_channels = num_channels = sum(part.length for part in self._convolved)
        self.conv = nn.Parameter(torch.empty(num_channels * spec.conv_size, dtype=torch.float32), requires_grad=False)
        """[channels, tokens], in one row."""
        self.conv_bias = None
        if biases[1]:
            self.conv_bias = nn.Parameter(torch.empty(num_channels, dtype=torch.float32), requires_grad=False)
        self._vectors = dict(vectors)
        self.vectors = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(part.stop - part.start, dtype=torch.float32), requires_grad=False)
                for name, (_, part) in vectors.items()
            }
        )
        self._mesh = mesh
        self._number: int | None = None
        self._kernels: StateKernels | None = None
        self._packed: PackedState | None = None

    def use(self, states: StateRows) -> None:
        """states: of the stage, in the order of whose layers this call comes."""
        self._number = states.add_layer(self.mix)
        self._states = states

    def forward(self, x: Tensor, norm: Norm | None) -> Tensor:
        """norm: applied to x first."""
        assert self._number is not None
        features = self.inputs(x, norm)
        if torch.compiler.is_compiling():
            features = mixed_by_operation(features, self._number, self._width)
        else:
            features = self._states.mix(features, self._number)
        mixed: Tensor = self.out(features)
        return mixed

    def use_kernels(self, kernels: StateKernels) -> None:
        """From now on, the CPU kernels mix, if they compute such a layer."""
        if PackedState.computes(self._state, self._mesh.tp_size):
            self._kernels = kernels

    def mix(self, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        """features [T, F] -> [T, W]. memory: float32 [rows, numbers], which is changed."""
        packed = self.packed
        if packed is None:
            return self.mix_by_torch(features, memory, segments)
        return packed.mix(features.contiguous(), memory, segments.arrays)

    @property
    def packed(self) -> PackedState | None:
        """As the CPU kernels read it, once all weights are loaded; None unless these mix."""
        if self._packed is None and self._kernels is not None:
            self._packed = PackedState(self._kernels, self._state, self._mesh.tp_size, *self._weights)
        return self._packed

    @property
    def _weights(self) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        bias = None if self.conv_bias is None else self.conv_bias.data
        vectors = {name: vector.data for name, vector in self.vectors.items()}
        return self.conv.data.view(self.num_channels, -1), bias, vectors

    @abstractmethod
    def mix_by_torch(self, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        """As mix."""

    def _conv(self, x: Tensor, memory: Tensor, first: int, segments: Segments) -> Tensor:
        """x [T, channels]. first: the first number of the convolution's state in a row."""
        shape = len(memory), self._conv_size - 1, self.num_channels
        states = memory[:, first : first + shape[1] * shape[2]].view(shape)
        output = convolve(x, self.conv.view(self.num_channels, -1), states, segments)
        return output if self.conv_bias is None else output + self.conv_bias

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """prefix: ends with "state."."""
        shards = self.inputs.weight_shards(prefix) + self.out.weight_shards(prefix)
        first, offset, size = 0, 0, self._conv_size
        total = sum(part.size for part in self._convolved)
        for part in self._convolved:
            own = slice(first, first + part.length)
            rows = slice(offset + part.start, offset + part.start + part.length)
            numbers = slice(own.start * size, own.stop * size)
            place = f"{prefix}conv.weight", (total, 1, size), (rows, slice(None), slice(None)), self.conv[numbers]
            write = partial(self._write, self.conv, numbers)
            shards.append(WeightShard(*place, write, is_flattened=True))
            if self.conv_bias is not None:
                write = partial(self._write, self.conv_bias, own)
                shards.append(WeightShard(f"{prefix}conv.bias", (total,), (rows,), self.conv_bias[own], write))
            first, offset = own.stop, offset + part.size
        for name, (whole_size, part_of) in self._vectors.items():
            vector = self.vectors[name]
            write = partial(self._write, vector, slice(None))
            source = f"{prefix}norm.weight" if name == "norm" else f"{prefix}{name}"
            shards.append(WeightShard(source, (whole_size,), (part_of,), vector, write))
        return shards

    def _write(self, parameter: Tensor, place: slice, values: Tensor) -> None:
        parameter.data[place] = values.float()
        if self._packed is not None:
            self._packed.write(*self._weights)


class GatedDelta(StateLayer):
    """See GatedDeltaSpec."""

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        start, length = mesh.shard(spec.num_key_heads, "key heads of states")
        ratio = spec.num_value_heads // spec.num_key_heads
        first, self._num_heads = start * ratio, length * ratio
        key = spec.num_key_heads * spec.key_dim, start * spec.key_dim, length * spec.key_dim
        width = first * spec.value_dim, self._num_heads * spec.value_dim
        value, heads = (spec.num_value_heads * spec.value_dim, *width), (spec.num_value_heads, first, self._num_heads)
        parts = [
            *(Part("q", *key, True), Part("k", *key, True), Part("v", *value, True)),
            *(Part("z", *value), Part("b", *heads), Part("a", *heads)),
        ]
        own = spec.num_value_heads, slice(first, first + self._num_heads)
        vectors = {"dt_bias": own, "A_log": own, "norm": (spec.value_dim, slice(0, spec.value_dim))}
        super().__init__(spec, parts, (value[0], width), hidden_size, mesh, dtype, vectors)
        self._spec, self._ratio = spec, ratio

    def mix_by_torch(self, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        spec, heads = self._spec, self._num_heads
        width = heads * spec.value_dim
        convolved, gate, rate, step = torch.split(features.float(), [self.num_channels, width, heads, heads], dim=1)
        num_recurrent = heads * spec.key_dim * spec.value_dim
        convolved = functional.silu(self._conv(convolved, memory, num_recurrent, segments))
        key_size = heads // self._ratio * spec.key_dim
        query, key, value = torch.split(convolved, [key_size, key_size, width], dim=1)
        query, key = (self._heads(each) for each in (query, key))
        decay = -self.vectors["A_log"].exp() * functional.softplus(step + self.vectors["dt_bias"])
        by_head = torch.unflatten(value, 1, (heads, spec.value_dim))
        rows = Rows(query * spec.key_dim**-0.5, key, by_head, decay, rate.sigmoid())
        states = memory[:, :num_recurrent].view(len(memory), heads, spec.key_dim, spec.value_dim)
        output = recur(rows, states, segments)
        output = functional.rms_norm(output, (spec.value_dim,), self.vectors["norm"], spec.eps)
        return (output.flatten(1) * functional.silu(gate)).to(features.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """[T, key heads * K] -> [T, value heads, K], each of length 1."""
        by_head = torch.unflatten(x, 1, (-1, self._spec.key_dim))
        by_head = by_head * torch.rsqrt(by_head.square().sum(-1, keepdim=True) + _LENGTH_EPS)
        return by_head.repeat_interleave(self._ratio, dim=1)


class ShortConv(StateLayer):
    """See ShortConvSpec."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        start, length = mesh.shard(spec.width, "channels of states")
        share = spec.width, start, length
        # The input of the convolution is b * x: its weights are as many as one of them has.
        parts = [Part("b", *share), Part("c", *share), Part("x", *share, True)]
        biases = (spec.has_bias,) * 3
        super().__init__(spec, parts, (spec.width, (start, length)), hidden_size, mesh, dtype, {}, biases)

    def mix_by_torch(self, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        before, after, x = features.float().chunk(3, dim=1)
        return (after * self._conv(before * x, memory, 0, segments)).to(features.dtype)


class Mamba2(StateLayer):
    """See Mamba2Spec."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        start, self._num_heads = mesh.shard(spec.num_heads, "heads of states")
        first, self._num_groups = 0, 1
        if spec.num_groups > 1:
            first, self._num_groups = mesh.shard(spec.num_groups, "groups of states")
        width = start * spec.head_dim, self._num_heads * spec.head_dim
        inner, heads = (spec.num_heads * spec.head_dim, *width), (spec.num_heads, start, self._num_heads)
        size = spec.state_size
        group = spec.num_groups * size, first * size, self._num_groups * size
        parts = [
            *(Part("z", *inner), Part("x", *inner, True), Part("b", *group, True), Part("c", *group, True)),
            Part("dt", *heads),
        ]
        own = spec.num_heads, slice(start, start + self._num_heads)
        vectors = {"dt_bias": own, "A_log": own, "D": own}
        if spec.has_norm:
            vectors["norm"] = inner[0], slice(width[0], sum(width))
        biases = spec.has_bias, spec.has_conv_bias, spec.has_out_bias
        super().__init__(spec, parts, (inner[0], width), hidden_size, mesh, dtype, vectors, biases)
        self._spec = spec

    def mix_by_torch(self, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        spec, heads = self._spec, self._num_heads
        width, size = heads * spec.head_dim, self._num_groups * spec.state_size
        sizes = [width, width, size, size, heads]
        parts = torch.split(features.float(), sizes, dim=1)
        gate, x, b, c, step = (
            part if scale == 1 else part * scale for part, scale in zip(parts, spec.scales, strict=True)
        )
        num_recurrent = heads * spec.state_size * spec.head_dim
        convolved = functional.silu(self._conv(torch.cat((x, b, c), dim=1), memory, num_recurrent, segments))
        x, b, c = torch.split(convolved, [width, size, size], dim=1)
        step = functional.softplus(step + self.vectors["dt_bias"]).clamp(min=spec.min_step)
        by_head = torch.unflatten(x, 1, (heads, spec.head_dim))
        decay = -self.vectors["A_log"].exp() * step
        rows = Rows(self._of_heads(c), self._of_heads(b), by_head * step.unsqueeze(-1), decay, None)
        states = memory[:, :num_recurrent].view(len(memory), heads, spec.state_size, spec.head_dim)
        output: Tensor = (recur(rows, states, segments) + by_head * self.vectors["D"].unsqueeze(-1)).flatten(1)
        gate = functional.silu(gate)
        if not spec.has_norm:
            return (output * gate).to(features.dtype)
        output = self._normed(output) * gate if spec.norm_before_gate else self._normed(output * gate)
        return output.to(features.dtype)

    def _of_heads(self, x: Tensor) -> Tensor:
        """[T, groups * N] -> [T, heads, N]."""
        by_group = torch.unflatten(x, 1, (self._num_groups, self._spec.state_size))
        return by_group.repeat_interleave(self._num_heads // self._num_groups, dim=1)

    def _normed(self, x: Tensor) -> Tensor:
        """x [T, W]."""
        by_group = torch.unflatten(x, 1, (self._num_groups, -1))
        mean = by_group.square().mean(-1, keepdim=True)
        if self._spec.num_groups == 1 and self._mesh.tp_size > 1:
            mean = sum_in_float32(mean, self._mesh) / self._mesh.tp_size
        normed: Tensor = (by_group * torch.rsqrt(mean + self._spec.eps)).flatten(1) * self.vectors["norm"]
        return normed


def make_state_layer(spec: StateSpec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> StateLayer:
    if isinstance(spec, GatedDeltaSpec):
        return GatedDelta(spec, hidden_size, mesh, dtype)
    if isinstance(spec, ShortConvSpec):
        return ShortConv(spec, hidden_size, mesh, dtype)
    return Mamba2(spec, hidden_size, mesh, dtype)
