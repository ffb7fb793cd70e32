"""Load a checkpoint's tensors from its files directly into the model's parameters."""

import ctypes
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.quantized.config import Quantization
from tokasaurus.model.cpu.layer_executor import BlockRows
from tokasaurus.model.decoder.tensor_files import TensorFile, open_files, read_shard
from tokasaurus.model.decoder.uploads import Uploads

_CHECKED_NUMBERS = 1 << 20
"""Largest part of a tensor that is looked at at once for numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One checkpoint tensor, and where this rank stores its shard of it."""

    source: str
    """Name in the checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""

    shard: tuple[slice, ...]
    """The part of the tensor that this rank has."""

    target: Tensor | None
    """A view into a parameter, of the shard's shape until the parameter is packed; None if another pipeline stage has
    the tensor."""

    write: Callable[[Tensor], object] | None = None
    """Replaces the shard in every layout that it has, in place; None if another pipeline stage has the tensor."""

    take_blocks: Callable[[BlockRows], None] | None = None
    """Takes the shard's quantised rows in place of a target that is filled; None where that is not possible."""

    order: Tensor | None = None
    """int64, on the host: which of the stored shard's rows each of the target's is; None: the same."""

    factor: float = 1.0
    """What each stored number is multiplied by."""

    added: float = 0.0
    """What is added to each stored number."""

    is_flattened: bool = False
    """The stored shard is a matrix, and the target is all of its numbers in one row."""

    is_stacked: bool = False
    """The stored shard is a stack of one matrix, [1, rows, columns]."""

    is_transposed: bool = False
    """The stored shard is the transpose of the target, in a stack of one matrix, [1, columns, rows]."""

    linear: tuple[nn.Module, int] | None = None
    """The linear layer that has the weight, and the first of its outputs there; None where adapters add nothing."""

    def arranged(self, data: Tensor) -> Tensor:
        """The stored shard as the target has it."""
        if self.is_stacked or self.is_transposed:
            data = data[0].T if self.is_transposed else data[0]
        if self.is_flattened:
            data = data.flatten()
        if self.order is not None:
            data = data[self.order]
        return data.float() * self.factor + self.added if self.added or self.factor != 1 else data

    @property
    def is_rearranged(self) -> bool:
        is_reshaped = self.is_flattened or self.is_stacked or self.is_transposed
        return self.order is not None or self.added != 0 or self.factor != 1 or is_reshaped


def whole(source: str, target: Tensor, write: Callable[[Tensor], None]) -> WeightShard:
    """The whole tensor, which every rank has."""
    return WeightShard(source, tuple(target.shape), tuple(slice(None) for _ in target.shape), target, write)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialised ones on `device`. On a CPU, filling them takes the memory.

    Like nn.Module.to_empty, which for the meta device imports sympy, and that takes a second.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(owner, name, nn.Parameter(empty, requires_grad=False))


class FilledModules:
    """Calls `then` with each module of `model` whose own parameters have all been filled."""

    def __init__(self, model: nn.Module, then: Callable[[nn.Module], None]) -> None:
        self._then = then
        self._owners: dict[int, nn.Module] = {}  # by the address of a parameter's storage
        self._num_missing = Counter[nn.Module]()  # elements not yet filled
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners[parameter.untyped_storage().data_ptr()] = module
                self._num_missing[module] += parameter.numel()

    def note(self, target: Tensor) -> None:
        """Record that `target`, of a WeightShard, has been filled."""
        owner = self._owners[target.untyped_storage().data_ptr()]
        self._num_missing[owner] -= target.numel()
        if self._num_missing[owner] == 0:
            self._then(owner)


def load_weights(
    files: Sequence[Path],
    shards: Iterable[WeightShard],
    ignored: Callable[[str], bool],
    on_bytes: Callable[[int], None] = lambda _: None,
    on_filled: Callable[[Tensor], None] = lambda _: None,
    may_keep_blocks: bool = False,
    quantization: Quantization | None = None,
    uploads: Uploads | None = None,
) -> Counter[str]:
    """Fill the target of every shard from the files, one tensor in memory at a time.

    shards: pass an iterator to keep no target in memory after it is filled.
    ignored: whether to skip a tensor that no shard names; any other unnamed tensor is an error.
    on_bytes: called with the size of each shard read. on_filled: called with each target when it is filled.
    may_keep_blocks: shards take quantised rows as blocks where they can, in place of filled targets.
    quantization: of weights in safetensors files. uploads: to the targets' device, or None if they are on the host;
    they may be under way on return.
    Returns how many quantised tensors of each type were dequantised.
    Raises CheckpointError naming the first missing, surplus or misshapen tensor, before any is read.
    """
    expected = _by_source(shards)
    seen: set[str] = set()
    for file in open_files(files, quantization):
        _check_names(file, expected, seen, ignored)
    if missing := sorted(expected.keys() - seen):
        raise CheckpointError(f"the checkpoint lacks tensor {missing[0]}{_and_more(len(missing) - 1)}")
    dequantised = Counter[str]()
    for file in open_files(files, quantization):
        dequantised += _load_file(file, expected, on_bytes, on_filled, may_keep_blocks, uploads)
    return dequantised


def check_update(
    files: Sequence[Path],
    shards: Iterable[WeightShard],
    ignored: Callable[[str], bool],
    dtypes: Container[torch.dtype],
    is_partial: bool,
    quantization: Quantization | None = None,
) -> None:
    """Whether `write_update` may be called. dtypes: the dtypes that tensors may have. is_partial: tensors may be
    missing. quantization: of weights in safetensors files.

    Reads this rank's shard of every tensor. Raises CheckpointError naming the first tensor that is missing, surplus,
    misshapen, of another dtype or not finite.
    """
    expected = _by_source(shards)
    seen = set[str]()
    for file in open_files(files, quantization):
        _check_names(file, expected, seen, ignored)
    missing = sorted(expected.keys() - seen)
    if missing and not is_partial:
        raise CheckpointError(f"tensor {missing[0]} is missing{_and_more(len(missing) - 1)}")
    for file, name, shard in _shards_in(files, expected, quantization):
        data = read_shard(file, name, shard.shard)
        if data.dtype not in dtypes:
            raise CheckpointError(f"tensor {name} has dtype {str(data.dtype).removeprefix('torch.')}")
        if not _is_finite(data):
            raise CheckpointError(f"tensor {name} has numbers that are not finite")


def _is_finite(data: Tensor) -> bool:
    """Whether all numbers are finite. Works in parts, since torch's intermediate results are nearly as large as its
    input."""
    rows_of_part = max(1, _CHECKED_NUMBERS // max(1, data[0].numel())) if data.numel() else 1
    return all(bool(part.isfinite().all()) for part in torch.split(data, rows_of_part))


def write_update(
    files: Sequence[Path],
    shards: Iterable[WeightShard],
    quantization: Quantization | None = None,
    uploads: Uploads | None = None,
) -> None:
    """Replace the weights that the files have, in place. One tensor's shard is in memory at a time. quantization and
    uploads: as of load_weights.

    Raises CheckpointError if a file that was readable just before is no longer."""
    for file, name, shard in _shards_in(files, _by_source(shards), quantization):
        if uploads is not None:  # on a device, a weight has no layout but its target
            _fill(shard, file, name, uploads)
        else:
            assert shard.write is not None
            shard.write(shard.arranged(read_shard(file, name, shard.shard)))


def _shards_in(
    files: Sequence[Path], expected: dict[str, list[WeightShard]], quantization: Quantization | None
) -> Iterator[tuple[TensorFile, str, WeightShard]]:
    """Tensors that this rank has shards of: open file, name, shard; in the files' order."""
    for file in open_files(files, quantization):
        for name in file.names():
            for shard in expected.get(name, ()):
                if shard.target is not None:
                    yield file, name, shard


def _fill(shard: WeightShard, file: TensorFile, name: str, uploads: Uploads | None) -> None:
    """Fill the shard's target. uploads: as of load_weights."""
    assert shard.target is not None
    copy = Tensor.copy_ if uploads is None else uploads.copy
    with torch.no_grad():
        if shard.is_rearranged:
            copy(shard.target, shard.arranged(read_shard(file, name, shard.shard)))
            return
        for indices, part in file.parts(name, shard.shard):
            copy(shard.target[indices], part)  # by all torch threads; each reads its part of the file


def fill_randomly(shards: Iterable[WeightShard], on_filled: Callable[[Tensor], None] = lambda _: None) -> None:
    """Fill the target of every shard with numbers as trained models have them: near 1 for norms, near 0 for all else.

    on_filled: called with each target when it is filled."""
    torch.manual_seed(0)
    for shard in shards:
        if shard.target is not None:
            is_norm = len(shard.shape) == 1 and not shard.source.endswith("bias")
            with torch.no_grad():
                shard.target.normal_(float(is_norm), 0.02)
            on_filled(shard.target)


def return_freed_memory() -> None:
    """Give freed memory back to the system, such as the memory of packed weights.

    Without it, GNU's allocator keeps tensors of less than 32 MiB: at three ranks, nearly half as much as the weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _by_source(shards: Iterable[WeightShard]) -> dict[str, list[WeightShard]]:
    by_source: dict[str, list[WeightShard]] = {}
    for shard in shards:
        by_source.setdefault(shard.source, []).append(shard)
    return by_source


def _check_names(
    file: TensorFile, expected: dict[str, list[WeightShard]], seen: set[str], ignored: Callable[[str], bool]
) -> None:
    """Check the tensors of one file by its header, and add their names to `seen`."""
    for name in file.names():
        if name in seen:
            raise CheckpointError(f"tensor {name} is in the checkpoint twice, the second time in {file.path.name}")
        seen.add(name)
        if name not in expected:
            if ignored(name):
                continue
            raise CheckpointError(f"{file.path.name} has tensor {name}, which this model has no place for")
        shape = file.shape(name)
        for shard in expected[name]:
            if shape != shard.shape:
                raise CheckpointError(f"tensor {name} has shape {shape}, but config.json makes it {shard.shape}")


def _load_file(
    file: TensorFile,
    expected: dict[str, list[WeightShard]],
    on_bytes: Callable[[int], None],
    on_filled: Callable[[Tensor], None],
    may_keep_blocks: bool,
    uploads: Uploads | None,
) -> Counter[str]:
    """Load one file, which has been checked. Removes the tensors it loads from `expected`. Returns what `load_weights`
    does."""
    dequantised = Counter[str]()
    for name in file.names():  # in this order, the disk is read sequentially
        for shard in expected.pop(name, ()):
            if shard.target is None:
                continue
            blocks = file.shard_blocks(name, shard.shard) if may_keep_blocks and shard.take_blocks is not None else None
            if blocks is not None:
                assert shard.take_blocks is not None
                if shard.order is not None:
                    blocks = BlockRows(blocks.type, blocks.blocks[shard.order])
                shard.take_blocks(blocks)
                on_bytes(blocks.blocks.nbytes)
                on_filled(shard.target)
                continue
            if (block_type := file.block_type(name)) is not None:
                dequantised[block_type] += 1
            _fill(shard, file, name, uploads)
            on_bytes(file.num_bytes(name) * shard.target.numel() // max(1, prod(shard.shape)))
            on_filled(shard.target)
    return dequantised


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""
