"""The feed-forward of a layer with experts on the CPU kernels: routing, and one product for the rows of all experts
(csrc/gemm/experts.h)."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import Activation, GateLimits, RouterSpec
from tokasaurus.model.cpu.bindings import ROUTER_SCORES, ExpertsStruct, PackedWeightsStruct
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedNorm, PackedWeights

MAX_ROWS = 8192
"""Rows of experts that the kernels compute at a time, as Kernels.max_expert_rows says too."""

# T tokens, each with K chosen ones of N experts; E hidden size, W width of an expert


class ExpertWeights:
    """The same linear layer of N experts: N weights [O, E], with biases [N, O]. Rows have numbers through all."""

    def __init__(
        self,
        kernels: LayerKernels,
        weights: Iterable[Tensor | BlockWeight],
        is_gated: bool = False,
        activation: Activation | None = None,
        biases: Tensor | None = None,
        gate_limits: GateLimits | None = None,
    ) -> None:
        """weights: each is packed before the next one is asked for. is_gated, activation, gate_limits: as of
        PackedWeights."""
        self.packed = [
            PackedWeights(
                *(kernels, weight, None if biases is None else biases[index], is_gated, activation, gate_limits)
            )
            for index, weight in enumerate(weights)
        ]
        self.kernels = kernels
        self.structs = (PackedWeightsStruct * len(self.packed))(*(each.struct for each in self.packed))

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


@dataclass(frozen=True, slots=True)
class PackedRouter:
    """What chooses a token's experts."""

    spec: RouterSpec
    weight: PackedWeights
    """float32 [N, E]; if the shared expert has a gate, [N + 1, E], with the gate's last."""
    choice_bias: Tensor | None = None
    """float32 [N]."""


class PackedExperts:
    """x [T, E] -> [T, E]: for each token, the sum of its experts' down(activation(gate(x)) * up(x)), each times its
    weight, in float32, and of a shared expert's. A row's result does not depend on the others; with quantised weights
    whose results are bfloat16, it does by the rounding of sums of float32."""

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        router: PackedRouter | None = None,
        shared: tuple[PackedWeights, PackedWeights] | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        """router: None if each call gives the choices. shared: gate_up and down of the expert of all tokens.
        weighs_inputs: as of RouterSpec."""
        self.gate_up, self.down, self._router, self._shared = gate_up, down, router, shared
        self.struct = ExpertsStruct(num_experts=len(down.packed), gate_up=gate_up.structs, down=down.structs)
        self.struct.weighs_inputs = weighs_inputs
        if router is not None:
            spec, bias = router.spec, router.choice_bias
            self.struct.num_chosen, self.struct.router = spec.num_chosen, router.weight.struct
            self.struct.scores = ROUTER_SCORES[spec.scores]
            self.struct.choice_bias = 0 if bias is None else bias.data_ptr()
            self.struct.num_groups, self.struct.num_chosen_groups = spec.num_groups, spec.num_chosen_groups
            self.struct.normalizes, self.struct.min_sum = spec.normalizes, spec.min_sum
            self.struct.scale, self.struct.jitter = spec.scale, spec.jitter
            self.struct.gates_shared = router.weight.out_size > spec.num_experts
        if shared is not None:
            self.struct.shared_gate_up, self.struct.shared_down = (each.struct for each in shared)

    @property
    def has_router(self) -> bool:
        return self._router is not None

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """chosen: int64 [T, K], in each row none twice; what is not from 0 to N - 1 adds nothing. weights [T, K]."""
        chosen, weights = chosen.contiguous(), weights.float().contiguous()
        self.struct.num_chosen = chosen.shape[1]
        return self._run(x, None, chosen.data_ptr(), weights.data_ptr())

    def routed(self, x: Tensor, norm: PackedNorm | None = None) -> Tensor:
        """By the router's choices. norm: applied to x first."""
        assert self._router is not None
        return self._run(x, norm, 0, 0)

    def record(self, chosen: Tensor | None) -> None:
        """From now on, calls write the router's choices of their T tokens to chosen, int32 [>= T, K], contiguous; None:
        no longer."""
        self.struct.recorded = None if chosen is None else chosen.data_ptr()

    def reserve(self, num_rows: int, num_chosen: int) -> None:
        """Allocate and touch the memory that calls of up to num_rows tokens keep between calls, whichever experts they
        choose. num_chosen: of each token."""
        self.struct.num_chosen = num_chosen
        self.down.kernels.reserve_experts(ctypes.addressof(self.struct), num_rows)

    def _run(self, x: Tensor, norm: PackedNorm | None, chosen: int, weights: int) -> Tensor:
        assert x.dtype == self.down.packed[0].activation_dtype
        x = x.contiguous()
        out = torch.empty_like(x)
        self.down.kernels.run_experts(
            *(ctypes.addressof(self.struct), None if norm is None else ctypes.addressof(norm.struct)),
            *(x.data_ptr(), len(x), chosen, weights, out.data_ptr()),
        )
        return out
