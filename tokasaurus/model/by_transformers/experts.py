"""The experts of transformers' class: by one product of the CPU kernels for all of them, where the class computes usual
ones (transformers' ExpertsInterface says what these are), else as the class does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint.spec import Activation, GateLimits, MLPSpec
from tokasaurus.model.cpu.experts import ExpertWeights, PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels, takes
from tokasaurus.model.decoder.layers import activated

_USUAL, _UNUSUAL = ("has_gate", "is_concatenated"), ("is_transposed", "has_bias", "has_post_expert_norm")
"""Attributes of modules that are true, and that are false, if the experts are usual."""
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
"""Of gates on the kernels."""
_TRIED_WIDTH = 4096


class ClassExperts:
    """One layer's, which the module's forward then calls."""

    def __init__(self, module: Any) -> None:
        self.packed: PackedExperts | None = None
        self.num_bytes = 0
        """Of the weights that have been packed."""
        self._num_chosen = 0
        """Of a token; 0 until the module's first call, of the probe."""
        self._module = module
        self._own = module.forward
        module.forward = self._forward

    def pack(self, kernels: LayerKernels) -> None:
        """Copy the weights into the kernels' layout and free them, if the kernels take them."""
        gate_up, down = self._module.gate_up_proj, self._module.down_proj
        gate = _gate_of(self._module) if takes(gate_up[0]) and takes(down[0]) else None
        if gate is None:
            return
        self.num_bytes = gate_up.nbytes + down.nbytes
        first = ExpertWeights(kernels, gate_up.data, True, gate.activation, gate_limits=gate.gate_limits)
        gate_up.data = gate_up.new_empty(0)  # before the other is packed: both take much memory
        self.packed = PackedExperts(first, ExpertWeights(kernels, down.data))
        down.data = down.new_empty(0)

    def write(self, name: str, place: tuple[slice, ...], values: Tensor) -> None:
        """Replace a part of the parameter `name`."""
        if self.packed is None:
            self._module.get_parameter(name)[place].copy_(values)
            return
        weights = self.packed.gate_up if name == "gate_up_proj" else self.packed.down
        own = range(len(weights.packed))[place[0]]
        for expert, rows in zip(own, values.view(len(own), -1, values.shape[-1]), strict=True):
            weights.packed[expert].write(place[1].start or 0, rows)

    def reserve(self, num_rows: int) -> None:
        """As PackedExperts.reserve."""
        if self.packed is not None and self._num_chosen:
            self.packed.reserve(num_rows, self._num_chosen)

    def give_back(self) -> None:
        """Return the memory of packed weights to the system; `write` takes it again."""
        if self.packed is not None:
            self.packed.gate_up.give_back()
            self.packed.down.give_back()

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not self._num_chosen:
            self._num_chosen = top_k_index.shape[1]
        compute: Callable[..., Tensor] = self._own if self.packed is None else self.packed
        return compute(hidden_states, top_k_index, top_k_weights)


def has_usual_experts(module: nn.Module) -> bool:
    """Whether its parameters are those of N experts, [N, 2 W, E] with gates before ups and [N, E, W]."""
    return module._parameters.keys() == {"gate_up_proj", "down_proj"} and all(
        getattr(module, name, None) is (name in _USUAL) for name in _USUAL + _UNUSUAL
    )


def _gate_of(module: Any) -> MLPSpec | None:
    """The gate of the class, if the kernels have it, but for how they round: tried, since a class may have any."""
    limit, alpha = (getattr(module, name, getattr(module, f"swiglu_{name}", None)) for name in ("limit", "alpha"))
    gates = [MLPSpec(_TRIED_WIDTH, activation) for activation in _ACTIVATIONS]
    if limit is not None:
        limits = [GateLimits(limit)] if alpha is None else [GateLimits(limit), GateLimits(limit, alpha, 1.0)]
        gates += [MLPSpec(_TRIED_WIDTH, gate_limits=each) for each in limits]
    features = torch.rand(2 * _TRIED_WIDTH, generator=torch.Generator().manual_seed(0)).mul_(80).sub_(40)
    found = module._apply_gate(features)
    return next((gate for gate in gates if torch.allclose(found, activated(features, gate), rtol=1e-5)), None)
