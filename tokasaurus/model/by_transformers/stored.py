"""Which tensors of a checkpoint the parameters of transformers' class are made of, by its renames and conversions."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Split,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from tokasaurus.checkpoint import CheckpointError, ModelInfo, weight_files
from tokasaurus.checkpoint.weight_files import are_equal, has_weights, is_old_buffer, read_tensors
from tokasaurus.model.decoder.layers import Linear
from tokasaurus.model.decoder.weights import WeightShard

Place = tuple[slice, ...]


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

    def within(self, cut: Cut) -> Iterator["Stored"]:
        """What a rank has of it, with places in the rank's part of the parameter."""
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

    def shard(self, owner: nn.Module, parameter: nn.Parameter) -> WeightShard:
        """owner: the module that has the parameter."""
        target = parameter[self.place] if parameter.numel() else parameter
        if not self.shape:
            target = target.view(1)  # as single numbers are read
        if len(self.place) > len(self.shape):
            target = target.squeeze(0)
        if not isinstance(owner, Linear):
            return WeightShard(self.source, self.shape, self.part, target, partial(_write, target))
        first = self.place[0].start or 0
        if self.target.endswith(".bias"):
            return WeightShard(self.source, self.shape, self.part, target, partial(owner.write_bias, first))
        functions = partial(owner.write_weight, first), partial(owner.take_blocks, first)
        return WeightShard(self.source, self.shape, self.part, target, *functions)


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


def _write(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def find_stored(model: PreTrainedModel, directory: Path, info: ModelInfo) -> ClassTensors:
    """model: on the meta device. directory: of the checkpoint; without weights, they are named as the class names
    them. Raises CheckpointError if a parameter has no tensor, or a tensor no parameter."""
    state = model.state_dict(keep_vars=True)
    own_name: dict[int, str] = {}
    for name, tensor in state.items():
        own_name.setdefault(id(tensor), name)
    tied = {name: own for name, tensor in state.items() if (own := own_name[id(tensor)]) != name}
    if not has_weights(directory):
        return ClassTensors(
            [_whole(name, tuple(state[name].shape), name) for name in own_name.values()], tied=tied, copies={**tied}
        )
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    passed_over = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    tensors = read_tensors(weight_files(directory), info.quantization)
    renamed = {
        source: rename_source_key(source, renamings, converters, model.base_model_prefix, state) for source in tensors
    }
    sources = {name: source for source, (name, pattern) in renamed.items() if pattern is None}
    stored, filled = ClassTensors(tied=tied), Counter[str]()
    for source, tensor in tensors.items():
        name, pattern = renamed[source]
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        parts = [_whole(source, tensor.shape, name)]
        if converter is not None:
            parts = _converted(converter, source, tensor.shape, name, state)
        for part in parts:
            if part.target not in state:
                if is_old_buffer(source) or any(each.search(source) for each in passed_over):
                    stored.ignored.add(source)
                    continue
                raise CheckpointError(
                    f"the checkpoint has tensor {source}, which {type(model).__name__} has no place for"
                )
            own = tied.get(part.target, part.target)
            if own != part.target and own in sources:
                if are_equal(tensor, tensors[sources[own]]):
                    continue
                own = part.target  # both are stored, and differ: each is used, as in transformers
                del tied[own]
            found = state[own][part.place].shape
            if found.numel() != torch.Size(_size(part)).numel():
                raise CheckpointError(
                    f"tensor {source} has shape {tensor.shape}, but config.json makes it {tuple(found)}"
                )
            filled[own] += found.numel()
            stored.parts.append(replace(part, target=own))
    for name in {tied.get(name, name): None for name in state}:
        if filled[name] != state[name].numel():
            raise CheckpointError(f"the checkpoint lacks tensor {name}")
    for own in dict.fromkeys(tied.values()):
        names = [own, *(name for name, other in tied.items() if other == own)]
        for first in [sources[name] for name in names if name in sources][:1]:
            copies = {sources.get(name, name) for name in names} - {first}
            stored.copies |= dict.fromkeys(copies, first)
    return stored


def _whole(source: str, shape: tuple[int, ...], target: str) -> Stored:
    everything = tuple(slice(None) for _ in shape)
    return Stored(source, shape, everything, target, everything)


def _size(part: Stored) -> list[int]:
    return [len(range(*each.indices(size))) for each, size in zip(part.part, part.shape, strict=True)]


def _converted(
    converter: WeightConverter, source: str, shape: tuple[int, ...], target: str, state: Mapping[str, Tensor]
) -> list[Stored]:
    """The parts of a stored tensor that a conversion takes. target: the first parameter that it makes."""
    operations = [type(each) for each in converter.operations]
    everything = [slice(None) for _ in shape]
    pattern = next(each for each in converter.source_patterns if _matches(each, source))
    number = converter.source_patterns.index(pattern)
    if operations in ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate]):
        place = list(everything)
        if operations[0] is MergeModulelist:
            match = re.search(pattern.replace("*", r"(\d+)"), source)
            assert match is not None
            place.insert(0, slice(int(match[1]), int(match[1]) + 1))
        if operations[-1] is Concatenate:
            dim = converter.operations[-1].dim
            size = shape[dim - len(place) + len(shape)]
            _check_alike(source, size, converter, state[target].shape[dim])
            place[dim] = slice(number * size, (number + 1) * size)
        return [Stored(source, shape, tuple(everything), target, tuple(place))]
    if operations in ([Chunk], [Split]):
        dim, targets = converter.operations[0].dim, converter.target_patterns
        start, parts = 0, []
        for name in (target.replace(targets[0], other) for other in targets):
            part, size = list(everything), state[name].shape[dim]
            part[dim] = slice(start, start + size)
            start += size
            parts.append(Stored(source, shape, tuple(part), name, tuple(everything)))
        return parts
    names = ", ".join(each.__name__ for each in operations)
    raise CheckpointError(f"tensor {source} is stored in a way that is not read: transformers converts it by {names}")


def _check_alike(source: str, size: int, converter: WeightConverter, whole: int) -> None:
    """Raises CheckpointError unless tensors that are stored apart and joined have the same size."""
    if size * len(converter.source_patterns) != whole:
        raise CheckpointError(
            f"tensor {source} has {size} of {whole} numbers, not one of {len(converter.source_patterns)} equal parts"
        )


def _matches(pattern: str, source: str) -> bool:
    return re.search(pattern.replace("*", r"\d+"), source) is not None
