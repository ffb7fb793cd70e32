"""The feed-forwards of a layer's experts on the CPU kernels: rows sorted by expert, and one product for all of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import Activation
from tokasaurus.model.cpu.bindings import PackedWeightsStruct
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedWeights

MAX_ROWS = 8192
"""Rows of experts that are multiplied at a time: with more, intermediate results would take gigabytes."""

# T tokens, each with K chosen ones of N experts; E hidden size, W width of an expert


class ExpertWeights:
    """The same linear layer of N experts: N weights [O, E], with biases [N, O]. Rows have numbers through all."""

    def __init__(
        self,
        kernels: LayerKernels,
        weights: Sequence[Tensor | BlockWeight],
        is_gated: bool = False,
        activation: Activation | None = None,
        biases: Tensor | None = None,
    ) -> None:
        """is_gated, activation: as of PackedWeights."""
        own_biases = [None] * len(weights) if biases is None else [*biases]
        self.packed = [
            PackedWeights(kernels, weight, bias, is_gated, activation)
            for weight, bias in zip(weights, own_biases, strict=True)
        ]
        self._kernels = kernels
        self._structs = (PackedWeightsStruct * len(weights))(*(each.struct for each in self.packed))

    @property
    def has_blocks(self) -> bool:
        """Whether weights are quantised."""
        return self.packed[0].has_blocks

    @property
    def num_weights(self) -> int:
        return sum(each.num_weights for each in self.packed)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.packed)

    @property
    def _num_rows(self) -> int:
        """Of an expert: gate rows count, too."""
        return self.packed[0].num_weights // self.packed[0].in_size

    def write(self, first_row: int, rows: Tensor) -> None:
        """Replace rows of one expert. rows [n, E]."""
        expert, row = divmod(first_row, self._num_rows)
        self.packed[expert].write(row, rows)

    def write_blocks(self, first_row: int, rows: BlockRows) -> None:
        """Replace quantised rows of one expert, as PackedWeights.write_blocks."""
        expert, row = divmod(first_row, self._num_rows)
        self.packed[expert].write_blocks(row, rows)

    def write_bias(self, first: int, values: Tensor) -> None:
        """Replace numbers of one expert's bias."""
        expert, row = divmod(first, self._num_rows)
        self.packed[expert].write_bias(row, values)

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
        step = max(1, MAX_ROWS // chosen.shape[1])
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
