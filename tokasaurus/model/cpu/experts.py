"""The feed-forwards of a layer's experts on the CPU kernels: rows sorted by expert, and one product for all of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import Activation
from tokasaurus.model.cpu.bindings import PackedWeightsStruct
from tokasaurus.model.cpu.layer_executor import BlockWeight, LayerKernels, PackedWeights

_MAX_ROWS = 8192
"""Rows of experts that are multiplied at a time: with more, intermediate results would take gigabytes."""

# T tokens, each with K chosen ones of N experts; E hidden size, W width of an expert


class ExpertWeights:
    """The same linear layer of N experts: N weights [O, E]."""

    def __init__(
        self,
        kernels: LayerKernels,
        weights: Sequence[Tensor | BlockWeight],
        is_gated: bool = False,
        activation: Activation | None = None,
    ) -> None:
        """is_gated, activation: as of PackedWeights."""
        self.packed = [PackedWeights(kernels, weight, None, is_gated, activation) for weight in weights]
        self._kernels = kernels
        self._structs = (PackedWeightsStruct * len(weights))(*(each.struct for each in self.packed))

    def write(self, place: tuple[slice, ...], values: Tensor) -> None:
        """Replace rows of experts. place: in [N, O, E], with all columns; values: [n, rows, E], or an expert's
        [rows, E]."""
        own = self.packed[place[0]]
        for packed, rows in zip(own, values.view(len(own), -1, values.shape[-1]), strict=True):
            packed.write(place[1].start or 0, rows)

    def give_back(self) -> None:
        """Return the memory to the system; `write` takes it again."""
        for packed in self.packed:
            packed.give_back()

    def multiply(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [R, E] in the activation dtype, whose rows starts[n] to starts[n + 1] are those of expert n -> [R, O].

        starts: int64 [N + 1], from 0 to R."""
        assert x.stride(1) == 1
        assert x.dtype == self.packed[0].activation_dtype
        assert len(starts) == len(self.packed) + 1
        out = torch.empty((len(x), self.packed[0].out_size), dtype=x.dtype)
        self._kernels.multiply_groups(
            *(self._structs, len(self.packed), starts.data_ptr(), x.data_ptr(), x.stride(0), out.data_ptr())
        )
        return out


class PackedExperts:
    """x [T, E] -> [T, E]: for each token, the sum of its experts' down(activation(gate(x)) * up(x)), each times its
    weight, in float32. A row's result does not depend on the others."""

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, gate: Callable[[Tensor], Tensor] | None) -> None:
        """gate: makes [R, W] of gate_up's [R, 2 W]; None if gate_up does so itself."""
        self.gate_up, self.down = gate_up, down
        self._gate = gate

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """chosen: int64 [T, K], of the N experts. weights [T, K]."""
        step = max(1, _MAX_ROWS // chosen.shape[1])
        parts = zip(*(torch.split(each, step) for each in (x, chosen, weights)), strict=True)
        return torch.cat([self._part(*part) for part in parts])

    def _part(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As __call__, of tokens whose intermediate results fit into memory."""
        num_chosen = chosen.shape[1]
        expert = chosen.flatten()
        order = torch.argsort(expert, stable=True)
        starts = torch.zeros(len(self.down.packed) + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(expert, minlength=len(starts) - 1), 0, out=starts[1:])
        features = self.gate_up.multiply(x[order // num_chosen], starts)
        if self._gate is not None:
            features = self._gate(features).contiguous()
        by_expert = self.down.multiply(features, starts)
        by_token = torch.empty(by_expert.shape, dtype=torch.float32)
        by_token[order] = by_expert.float()
        weighted = by_token.view(*chosen.shape, -1).mul_(weights.float().unsqueeze(-1))
        return weighted.sum(1).to(x.dtype)
