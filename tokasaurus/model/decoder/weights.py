"""Load a checkpoint's tensors from safetensors files directly into the model's parameters."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tokasaurus.checkpoint import CheckpointError


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One checkpoint tensor, and where this rank stores its shard of it."""

    source: str
    """Name in the checkpoint."""

    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""

    shard: tuple[slice, ...]
    """The part of the tensor that this rank has."""

    target: Tensor | None
    """A view into a parameter, of the shard's shape; None if another pipeline stage has the tensor."""


def whole(source: str, target: Tensor) -> WeightShard:
    """The whole tensor, which every rank has."""
    return WeightShard(source, tuple(target.shape), tuple(slice(None) for _ in target.shape), target)


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
) -> None:
    """Fill the target of every shard from the safetensors files, one tensor in memory at a time.

    shards: pass an iterator to keep no target in memory after it is filled.
    ignored: whether to skip a tensor that no shard names; any other unnamed tensor is an error.
    on_bytes: called with the size of each tensor read. on_filled: called with each target when it is filled.
    Raises CheckpointError naming the first missing, surplus or misshapen tensor, before any is read.
    """
    expected = _by_source(shards)
    file = files[0]
    try:
        seen: set[str] = set()
        for file in files:
            _check_names(file, expected, seen, ignored)
        if missing := sorted(expected.keys() - seen):
            raise CheckpointError(f"the checkpoint lacks tensor {missing[0]}{_and_more(len(missing) - 1)}")
        for file in files:
            _load_file(file, expected, on_bytes, on_filled)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


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
    """Give freed memory back to the system, such as that of weights that have been packed.

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
    file: Path, expected: dict[str, list[WeightShard]], seen: set[str], ignored: Callable[[str], bool]
) -> None:
    """Check the tensors of one file by its header, and add their names to `seen`."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        for name in tensors.offset_keys():
            if name in seen:
                raise CheckpointError(f"tensor {name} is in the checkpoint twice, the second time in {file.name}")
            seen.add(name)
            if name not in expected:
                if ignored(name):
                    continue
                raise CheckpointError(f"{file.name} has tensor {name}, which this model has no place for")
            shape = tuple(tensors.get_slice(name).get_shape())
            for shard in expected[name]:
                if shape != shard.shape:
                    raise CheckpointError(f"tensor {name} has shape {shape}, but config.json makes it {shard.shape}")


def _load_file(
    file: Path,
    expected: dict[str, list[WeightShard]],
    on_bytes: Callable[[int], None],
    on_filled: Callable[[Tensor], None],
) -> None:
    """Load one file, which has been checked. Removes the tensors it loads from `expected`."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        # In file order, so that the disk is read sequentially.
        for name in tensors.offset_keys():
            if name not in expected:
                continue
            view = tensors.get_slice(name)
            for shard in expected.pop(name):
                if shard.target is None:
                    continue
                data = view[shard.shard]
                with torch.no_grad():
                    shard.target.copy_(data)  # by all torch threads, each of which reads its part of the file
                on_bytes(data.nbytes)
                on_filled(shard.target)


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""
