"""The layers of one pipeline stage of transformers' class: its own forward runs, with other modules in the place of the
other stages' layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# T tokens in this forward, E hidden size


class InPlaceOf(nn.Module):
    """What a class asks of a module beside calling it, such as a factor of logits, is the replaced module's."""

    hidden = torch.empty(0)
    """[1, T, E], set for each forward."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._replaced = (replaced,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_replaced"][0], name)


class Leaves(Exception):
    """Ends the class's forward behind the last layer of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        """hidden [1, T, E]."""
        self.hidden = hidden


class _Before(InPlaceOf):
    """In the place of a layer of an earlier stage: gives the hidden states that have entered this one."""

    def __init__(self, layer: nn.Module, output: Any) -> None:
        """output: such as the layer's."""
        super().__init__(layer)
        self._others = [None] * (len(output) - 1) if isinstance(output, tuple) else None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.hidden if self._others is None else (self.hidden, *self._others)


class _Behind(InPlaceOf):
    """In the place of a layer of a later stage."""

    def forward(self, *inputs: Tensor, **options: Any) -> None:
        raise Leaves(inputs[0] if inputs else options["hidden_states"])


@contextmanager
def outputs_of_modules() -> Iterator[dict[nn.Module, Any]]:
    """What modules give that are called inside; None for one that does not end."""
    outputs = dict[nn.Module, Any]()
    hooks = (
        register_module_forward_pre_hook(lambda module, _: outputs.update({module: None})),
        register_module_forward_hook(lambda module, _, output: outputs.update({module: output})),
    )
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def leave_layers(
    root: nn.Module, callers: Sequence[nn.Module], stage: range, outputs: dict[nn.Module, Any], size: tuple[int, ...]
) -> set[nn.Module]:
    """Leave the stage's layers alone in the class; returns all of their modules. Raises ValueError.

    callers: modules that call attention, one of each layer. outputs, size: of all modules, and of hidden states, in a
    run of all layers."""
    layers, own = _layers_with(root, callers), set[nn.Module]()
    for index, layer in enumerate(layers):
        output = outputs[layer]
        states = output[0] if isinstance(output, tuple) else output
        if states.shape != size:
            raise ValueError(f"its layers give {tuple(states.shape)}, not hidden states")
        if index in stage:
            own.update(layer.modules())
        else:
            layers[index] = _Before(layer, output) if index < stage.start else _Behind(layer)
    return own


def _layers_with(root: nn.Module, callers: Sequence[nn.Module]) -> nn.ModuleList:
    """The list of modules each of which has one of the callers."""
    for module in root.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(callers):
            continue
        if all(caller in set(each.modules()) for caller, each in zip(callers, module, strict=True)):
            return module
    raise ValueError("it has no list of its layers")
