"""The experts of transformers' class: by one product of the CPU kernels for all of them, where the class computes usual
ones (transformers' ExpertsInterface says what these are), else as the class does."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tokasaurus.checkpoint.spec import Activation
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
        self._module = module
        self._own = module.forward
        module.forward = self._forward

    def pack(self, kernels: LayerKernels) -> None:
        """Copy the weights into the kernels' layout and free them, if the kernels take them."""
        gate_up, down = self._module.gate_up_proj, self._module.down_proj
        if not takes(gate_up[0]) or not takes(down[0]):
            return
        activation, gate = _ACTIVATIONS.get(type(getattr(self._module, "act_fn", None))), None
        if activation is None or not _gates_plainly(self._module):
            activation, gate = None, self._module._apply_gate
        self.num_bytes = gate_up.nbytes + down.nbytes
        first = ExpertWeights(kernels, gate_up.data, gate is None, activation)
        gate_up.data = gate_up.new_empty(0)  # before the other is packed: both take much memory
        self.packed = PackedExperts(first, ExpertWeights(kernels, down.data), gate)
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

    def give_back(self) -> None:
        """Return the memory of packed weights to the system; `write` takes it again."""
        if self.packed is not None:
            self.packed.gate_up.give_back()
            self.packed.down.give_back()

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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


def _gates_plainly(module: Any) -> bool:
    """Whether it is act_fn(gate) * up: tried, since a class may have another, or round otherwise."""
    for dtype in (torch.float32, torch.bfloat16):
        features = torch.linspace(-40, 40, 4096, dtype=dtype)
        gates, ups = features.chunk(2)
        if not torch.equal(module._apply_gate(features), module.act_fn(gates) * ups):
            return False
    return True
