"""A rank's part of transformers' class, on the meta device: its share of the tensors by the class's own plan for tensor
parallelism, and the layers of its pipeline stage. The class's own forward runs; that of some modules is replaced."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tokasaurus.model.by_transformers.stored import Cut
from tokasaurus.model.decoder.layers import rows_of_ranks
from tokasaurus.model.parallel.collectives import gather_shards, sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, E hidden size


def gathered(output: Tensor, mesh: Mesh) -> Tensor:
    """[..., n] of each rank -> [..., tp_size * n]."""
    return gather_shards(output, mesh).movedim(0, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class Style:
    """What a word of transformers' plans says of a module or a parameter."""

    dim: int | None = None
    """Of a matrix, counted from the end, that is divided; None: every rank has all of it."""
    num_packed: int = 1
    """Equal parts of the dimension, each of which is divided."""
    splits_input: bool = False
    then: Callable[[Tensor, Mesh], Tensor] | None = None
    """What becomes of the module's output."""


_STYLES = {
    "colwise": Style(-2),
    "packed_colwise": Style(-2, num_packed=2),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Style(-2, then=gathered)),
    "rowwise": Style(-1, then=sum_over_shards),
    "packed_rowwise": Style(-1, num_packed=2),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), Style(-1, splits_input=True, then=sum_over_shards)),
    **dict.fromkeys(("moe_tp_experts", "all_reduce"), Style(then=sum_over_shards)),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), Style()),
}


def styles_of(model: PreTrainedModel) -> dict[str, Style]:
    """By the names of all modules and parameters. Raises ValueError for a class without a plan, and for other words."""
    plan: dict[str, str] = model.tp_plan or {}
    if not model.config.base_model_tp_plan:
        raise ValueError("transformers has no plan of its parts")
    ends, styles = (model.get_input_embeddings(), model.get_output_embeddings()), dict[str, Style]()

    def word(path: str, default: str) -> str:
        found = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), default)
        if found not in _STYLES:
            raise ValueError(f"{path} is divided in the style {found}, which is not computed")
        return found

    for path, module in model.named_modules():
        own = "colwise" if module in ends else word(path, "replicate")
        styles[path] = _STYLES[own]
        for name, _ in module.named_parameters(recurse=False):
            style = styles[f"{path}.{name}"] = _STYLES[word(f"{path}.{name}", own)]
            if style.dim is None and _STYLES[own].then is not None:
                raise ValueError(f"{path} is added up, but its {name} is not divided")
    return styles


def divide(model: PreTrainedModel, mesh: Mesh) -> dict[str, Cut]:
    """Leave the rank's parts of all parameters, and let modules exchange what they lack; returns the parts by name.
    Embedding and LM head have the rank's token ids. Raises ValueError."""
    styles, cuts, embedding = styles_of(model), dict[str, Cut](), model.get_input_embeddings()
    ends = embedding, model.get_output_embeddings()
    embedding.padding_idx = None
    replace_forward(embedding, rows_of_ranks, mesh.vocab_shard(embedding.num_embeddings), mesh)
    for path, module in model.named_modules():
        if styles[path].then is not None:
            replace_forward(module, _exchange, styles[path], mesh)
    for name, parameter in list(model.named_parameters()):
        path, _, own_name = name.rpartition(".")
        module, style = model.get_submodule(path), styles[name]
        if style.dim == -1 and parameter.dim() == 1:  # of a sum over ranks, to which one adds it
            module.register_parameter(own_name, None if mesh.tp_rank else parameter)
        elif style.dim is not None:
            dim = 0 if parameter.dim() == 1 else parameter.dim() + style.dim
            whole = parameter.shape[dim]
            size = whole // style.num_packed
            start, length = mesh.vocab_shard(size) if module in ends else mesh.shard(size, path)
            kept = tuple(range(first + start, first + start + length) for first in range(0, whole, size))
            cuts[name] = Cut(dim, whole, kept)
            sizes = *parameter.shape[:dim], length * style.num_packed, *parameter.shape[dim + 1 :]
            parameter.data = parameter.new_empty(sizes)
    return cuts


def replace_forward(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
    """By the function, whose arguments are these, the module's own forward, and what that is called with."""
    module.forward = partial(function, *arguments, module.forward)


def _exchange(style: Style, mesh: Mesh, own: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
    """The module takes its part of an input that all have, and its output becomes whole, as the style says."""
    if style.splits_input:
        inputs = inputs[0].narrow(-1, *mesh.shard(inputs[0].shape[-1], "input")), *inputs[1:]
    assert style.then is not None
    return style.then(own(*inputs, **options), mesh)


def leave_layers(
    layers: nn.ModuleList, stage: range, outputs: dict[nn.Module, Any], hidden: Tensor, at_edge: Callable[..., Tensor]
) -> None:
    """Leave the stage's layers alone; those of other stages pass hidden states on. Raises ValueError.

    outputs: of all modules in a run of all layers. hidden: states there, [T, E]. at_edge: the forward of other
    stages' layers, called with whether the stage is an earlier one, the layer's own forward, and what that gets."""
    for index, layer in enumerate(layers):
        if not isinstance(outputs[layer], Tensor) or outputs[layer].shape != (1, *hidden.shape):
            raise ValueError("its layers do not give hidden states alone")
        if index not in stage:
            for name in (*layer._modules, *layer._parameters):
                delattr(layer, name)
            replace_forward(layer, at_edge, index < stage.start)


def layers_with(root: nn.Module, callers: Sequence[nn.Module]) -> nn.ModuleList:
    """The list of modules each of which has one of the callers, which call attention. Raises ValueError."""
    for module in root.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(callers):
            continue
        if all(caller in {*layer.modules()} for caller, layer in zip(callers, module, strict=True)):
            return module
    raise ValueError("it has no list of its layers")
