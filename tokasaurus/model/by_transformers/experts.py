"""The experts of transformers' class: by one product of the CPU kernels for all of them, where the class computes usual
ones (transformers' ExpertsInterface says what these are), else as the class does."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tokasaurus.checkpoint.spec import Activation, GateLimits
from tokasaurus.model.cpu.experts import ExpertWeights, PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels, takes

_NAMES = {"gate_up_proj", "down_proj"}
_ACTIVATIONS: dict[type, Activation] = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu"]): "gelu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


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
        if not takes(gate_up[0]) or not takes(down[0]):
            return
        gate = _gate_of(self._module)
        if gate is None:
            return
        self.num_bytes = gate_up.nbytes + down.nbytes
        activation, limits = gate
        first = ExpertWeights(kernels, gate_up.data, True, activation, gate_limits=limits)
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
        if self.packed is None:
            own: Tensor = self._own(hidden_states, top_k_index, top_k_weights)
            return own
        return self.packed(hidden_states, top_k_index, top_k_weights)


def has_usual_experts(module: nn.Module) -> bool:
    """Whether its parameters are those of N experts, [N, 2 W, E] with gates before ups and [N, E, W]."""
    options = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    options["has_post_expert_norm"] = False
    return module._parameters.keys() == _NAMES and all(
        getattr(module, name, None) is value for name, value in options.items()
    )


def _gate_of(module: Any) -> tuple[Activation | None, GateLimits | None] | None:
    """The gate of the class, if the kernels have it, but for how they round: tried, since a class may have any."""
    gates, ups = torch.rand(2, 4096, generator=torch.Generator().manual_seed(0)).mul_(80).sub_(40)
    features = torch.cat((gates, ups))

    def is_own(expected: Tensor) -> bool:
        return torch.allclose(module._apply_gate(features), expected, rtol=1e-5)

    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
    if activation is not None and is_own(module.act_fn(gates) * ups):
        return activation, None
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    if limit is None:
        return None
    for limits in (GateLimits(limit), *([] if alpha is None else [GateLimits(limit, alpha, 1.0)])):
        few, magnitudes = gates.clamp(max=limits.limit), ups.clamp(-limits.limit, limits.limit)
        if is_own(few * torch.sigmoid(limits.alpha * few) * (magnitudes + limits.up_offset)):
            return None, limits
    return None
