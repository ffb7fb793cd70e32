"""A rank's parts of transformers' class by the class's own plan for tensor parallelism: on the meta device, parameters
become their parts, and modules exchange what they lack."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokasaurus.model.by_transformers.stored import Cut
from tokasaurus.model.parallel.collectives import gather_shards, sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh


def _summed(output: Tensor, mesh: Mesh) -> Tensor:
    return output if output.is_meta else sum_over_shards(output.contiguous(), mesh)


def gathered(output: Tensor, mesh: Mesh) -> Tensor:
    """[..., n] of each rank -> [..., tp_size * n]."""
    if output.is_meta:
        return output.repeat_interleave(mesh.tp_size, dim=-1)
    return gather_shards(output, mesh).movedim(0, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class Style:
    """What a word of transformers' plans says of a module or a parameter."""

    dim: int | None = None
    """Of a matrix, counted from the end, that is divided; None: every rank has all of it."""
    num_packed: int = 1
    """Equal parts of the dimension, each of which is divided."""
    is_by_token: bool = False
    """Parts need not have the same size, and an embedding looks up its own token ids."""
    splits_input: bool = False
    then: Callable[[Tensor, Mesh], Tensor] | None = None
    """What becomes of the module's output."""


_STYLES = {
    **dict.fromkeys(("vocabulary", "embedding_rowwise"), Style(-2, is_by_token=True)),
    "colwise": Style(-2),
    "packed_colwise": Style(-2, num_packed=2),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Style(-2, then=gathered)),
    "rowwise": Style(-1, then=_summed),
    "packed_rowwise": Style(-1, num_packed=2),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), Style(-1, splits_input=True, then=_summed)),
    **dict.fromkeys(("moe_tp_experts", "all_reduce"), Style(then=_summed)),
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
        own = "vocabulary" if module in ends else word(path, "replicate")
        styles[path] = _STYLES[own]
        for name, _ in module.named_parameters(recurse=False):
            style = styles[f"{path}.{name}"] = _STYLES[word(f"{path}.{name}", own)]
            if style.dim is None and _STYLES[own].then is not None:
                raise ValueError(f"{path} is added up, but its {name} is not divided")
    return styles


def divide(model: PreTrainedModel, mesh: Mesh) -> dict[str, Cut]:
    """The rank's parts by the names of parameters: embedding and LM head have its token ids. Raises ValueError."""
    styles, cuts = styles_of(model), dict[str, Cut]()
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            style = styles[f"{path}.{name}"]
            if style.dim == -1 and parameter.dim() == 1:  # of a sum over ranks, to which one adds it
                module.register_parameter(name, None if mesh.tp_rank else parameter)
            elif style.dim is not None:
                cut = cuts[f"{path}.{name}"] = _cut(parameter, style, mesh, path)
                sizes = list(parameter.shape)
                sizes[cut.dim] = sum(map(len, cut.kept))
                module.register_parameter(name, nn.Parameter(parameter.new_empty(sizes), requires_grad=False))
        if styles[path].is_by_token and isinstance(module, nn.Embedding):
            _embed_own(module, cuts[f"{path}.weight"].kept[0], mesh)
        elif not styles[path].is_by_token:
            _exchange(module, styles[path], mesh)
        elif module is not model.get_output_embeddings():
            raise ValueError(f"{path} is a {type(module).__name__}, which is not divided")
    return cuts


def _cut(parameter: Tensor, style: Style, mesh: Mesh, path: str) -> Cut:
    assert style.dim is not None
    dim = 0 if parameter.dim() == 1 else parameter.dim() + style.dim
    whole = parameter.shape[dim]
    size = whole // style.num_packed
    start, length = mesh.vocab_shard(size) if style.is_by_token else mesh.shard(size, path)
    return Cut(dim, whole, tuple(range(first + start, first + start + length) for first in range(0, whole, size)))


def _exchange(module: nn.Module, style: Style, mesh: Mesh) -> None:
    """Let the module take its part of an input that all have, and let its output be whole, as the style says."""

    def own_part(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start, length = mesh.shard(inputs[0].shape[-1], "input")
        return (inputs[0][..., start : start + length], *inputs[1:])

    if style.splits_input:
        module.register_forward_pre_hook(own_part)
    if (then := style.then) is not None:
        module.register_forward_hook(lambda _module, _inputs, output: then(output, mesh))


def _embed_own(module: nn.Embedding, kept: range, mesh: Mesh) -> None:
    """Let the embedding look up the rank's token ids, and add the other ranks' rows."""
    module.padding_idx = None
    elsewhere = torch.empty(0)

    def look_up(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal elsewhere
        local = inputs[0] - kept.start
        elsewhere = (local < 0) | (local >= len(kept))
        return (local.masked_fill(elsewhere, 0), *inputs[1:])

    module.register_forward_pre_hook(look_up)
    module.register_forward_hook(lambda _m, _i, rows: _summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0), mesh))
