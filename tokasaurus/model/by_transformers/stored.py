"""Which tensors of a checkpoint the parameters of transformers' class are made of, by its renames and conversions."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from tokasaurus.checkpoint import CheckpointError, ModelInfo, weight_files
from tokasaurus.checkpoint.weight_files import are_equal, has_weights, is_old_buffer, read_tensors
from tokasaurus.model.by_transformers.experts import ClassExperts
from tokasaurus.model.decoder.layers import Linear
from tokasaurus.model.decoder.weights import WeightShard

Place: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank has of a parameter."""

    dim: int
    size: int
    """Of the whole parameter's dimension."""
    kept: tuple[range, ...]
    """Indices of this dimension, in the order in which the rank has them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a stored tensor, and where it goes."""

    source: str
    shape: tuple[int, ...]
    """Of the whole stored tensor."""
    part: Place
    target: str
    """A parameter of the class."""
    place: Place
    """In the parameter; an expert's is one of the first dimension, which the stored tensor lacks."""

    def within(self, cut: Cut | None) -> Iterator["Stored"]:
        """What a rank has of it, with places in the rank's part of the parameter. cut: None if it has all of that."""
        if cut is None:
            yield self
            return
        dim = cut.dim - (len(self.place) - len(self.shape))
        to, start = range(cut.size)[self.place[cut.dim]], range(self.shape[dim])[self.part[dim]].start
        done = 0
        for kept in cut.kept:
            first, last = max(kept.start, to.start), min(kept.stop, to.stop)
            if first < last:
                own = slice(done + first - kept.start, done + last - kept.start)
                part = slice(start + first - to.start, start + last - to.start)
                yield replace(self, part=_at(self.part, dim, part), place=_at(self.place, cut.dim, own))
            done += len(kept)

    def shard(self, owner: nn.Module, name: str, experts: ClassExperts | None) -> WeightShard:
        """owner: the module that has the parameter `name`. experts: where it has the weights of such."""
        parameter = owner.get_parameter(name)
        target = parameter[self.place] if parameter.numel() else parameter
        if len(self.place) > len(self.shape):
            target = target.squeeze(0)
        if not self.shape:
            target = target.view(1)  # as single numbers are read
        arguments = self.source, self.shape, self.part, target
        if experts is not None:
            return WeightShard(*arguments, partial(experts.write, name, self.place))
        if not isinstance(owner, Linear):
            return WeightShard(*arguments, partial(Tensor.copy_, target))
        first = self.place[0].start or 0
        if self.target.endswith(".bias"):
            return WeightShard(*arguments, partial(owner.write_bias, first))
        return WeightShard(*arguments, partial(owner.write_weight, first), partial(owner.take_blocks, first))


@dataclass(slots=True)
class ClassTensors:
    """Of a whole model."""

    parts: list[Stored] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    """Stored tensors that the class does not read."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameters that are another one."""
    copies: dict[str, str] = field(default_factory=dict)
    """The same by stored names, which a checkpoint or new weights may have for both."""


def _at(place: Place, dim: int, new: slice) -> Place:
    return (*place[:dim], new, *place[dim + 1 :])


def find_stored(model: PreTrainedModel, directory: Path, info: ModelInfo) -> ClassTensors:
    """Unties parameters of the model that are stored apart, and differ.

    model: on the meta device. directory: of the checkpoint; without weights, they are named as the class names
    them. Raises CheckpointError if a parameter has no tensor, or a tensor no parameter."""
    state = model.state_dict(keep_vars=True)
    own_name = {tensor: name for name, tensor in reversed(state.items())}
    tied = {name: own_name[tensor] for name, tensor in state.items() if own_name[tensor] != name}
    stored, filled = ClassTensors(tied=tied), Counter[str]()
    if not has_weights(directory):
        stored.parts += [_whole(name, tuple(state[name].shape), name) for name in state if name not in tied]
        stored.copies |= tied
        return stored
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    passed_over = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    tensors = read_tensors(weight_files(directory), info.quantization)
    options = renamings, converters, model.base_model_prefix, state
    renamed = {source: rename_source_key(source, *options) for source in tensors}
    sources = {name: source for source, (name, pattern) in renamed.items() if pattern is None}
    for source, tensor in tensors.items():
        name, pattern = renamed[source]
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        whole = _whole(source, tensor.shape, name)
        for part in [whole] if converter is None else _converted(whole, converter, str(pattern), state):
            own = tied.get(part.target, part.target)
            if own not in state:
                if not is_old_buffer(source) and not any(each.search(source) for each in passed_over):
                    class_name = type(model).__name__
                    raise CheckpointError(f"the checkpoint has tensor {source}, which {class_name} has no place for")
                stored.ignored.add(source)
                continue
            if own != part.target and own in sources:
                if are_equal(tensor, tensors[sources[own]]):
                    continue
                own = part.target  # both are stored, and differ: each is used, as in transformers
                del tied[own]
                path, _, leaf = own.rpartition(".")
                setattr(model.get_submodule(path), leaf, nn.Parameter(state[own].clone(), requires_grad=False))
            filled[own] += _fitting(part, state[own])
            stored.parts.append(replace(part, target=own))
    for name in state:
        if filled[own := tied.get(name, name)] != state[own].numel():
            raise CheckpointError(f"the checkpoint lacks tensor {own}")
    used = {part.target: part.source for part in stored.parts}
    for name in {*tied, *tied.values()}:
        source, own_source = sources.get(name, name), used[tied.get(name, name)]
        if source != own_source:
            stored.copies[source] = own_source
    return stored


def _fitting(part: Stored, parameter: Tensor) -> int:
    """Numbers of the part. Raises CheckpointError if its place in the parameter has others."""
    place = parameter[part.place].shape
    if place.numel() != prod(len(range(size)[each]) for each, size in zip(part.part, part.shape, strict=True)):
        raise CheckpointError(f"tensor {part.source} has shape {part.shape}, but config.json makes it {tuple(place)}")
    return place.numel()


def _whole(source: str, shape: tuple[int, ...], target: str) -> Stored:
    everything = tuple(slice(None) for _ in shape)
    return Stored(source, shape, everything, target, everything)


def _converted(whole: Stored, converter: WeightConverter, pattern: str, state: Mapping[str, Tensor]) -> list[Stored]:
    """The parts of a stored tensor that a conversion takes. whole: with the first parameter that it makes as target.
    pattern: the converter's, of the stored name. Raises CheckpointError."""
    source, shape, place = whole.source, whole.shape, whole.place
    operations = [type(each).__name__ for each in converter.operations]
    if operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]):
        if operations[0] == "MergeModulelist":
            match = re.search(pattern.replace("*", r"(\d+)"), source)
            assert match is not None
            place = slice(int(match[1]), int(match[1]) + 1), *place
        if operations[-1] == "Concatenate":
            dim, num_joined = converter.operations[-1].dim, len(converter.source_patterns)
            size, num_all = shape[dim - len(place) + len(shape)], state[whole.target].shape[dim]
            if size * num_joined != num_all:
                raise CheckpointError(f"tensor {source} has {size} numbers, not {num_all} / {num_joined}")
            number = converter.source_patterns.index(pattern)
            place = _at(place, dim, slice(number * size, (number + 1) * size))
        return [replace(whole, place=place)]
    if operations in (["Chunk"], ["Split"]):
        dim, targets = converter.operations[0].dim, converter.target_patterns
        start, parts = 0, list[Stored]()
        for name in (whole.target.replace(targets[0], other) for other in targets):
            size = state[name].shape[dim]
            parts.append(replace(whole, part=_at(whole.part, dim, slice(start, start + size)), target=name))
            start += size
        return parts
    names = ", ".join(operations)
    raise CheckpointError(f"tensor {source} is stored in a way that is not read: transformers converts it by {names}")
