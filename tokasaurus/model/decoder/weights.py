"""Stream a checkpoint's tensors from safetensors shards straight into the model's parameters."""

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
    """One checkpoint tensor and where this rank's share of it belongs.

    source: name in the checkpoint. shape: of the whole tensor there. shard: the part this rank holds.
    target: a view into a parameter, of the shard's shape; None where another pipeline stage holds the tensor.
    """

    source: str
    shape: tuple[int, ...]
    shard: tuple[slice, ...]
    target: Tensor | None


def whole(source: str, target: Tensor) -> WeightShard:
    """A tensor that every rank holds whole."""
    return WeightShard(source, tuple(target.shape), tuple(slice(None) for _ in target.shape), target)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Put parameters made on the meta device onto `device`, unfilled. Memory on a CPU is first taken when it is filled.

    As nn.Module.to_empty does it, but that imports sympy for the meta device, which takes a second."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(owner, name, nn.Parameter(empty, requires_grad=False))


class FilledModules:
    """Calls `then` with each module of `model` whose own parameters have all been filled."""

    def __init__(self, model: nn.Module, then: Callable[[nn.Module], None]) -> None:
        self._then = then
        self._owners: dict[int, nn.Module] = {}  # by where a parameter's memory begins
        self._num_missing = Counter[nn.Module]()  # elements
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners[parameter.untyped_storage().data_ptr()] = module
                self._num_missing[module] += parameter.numel()

    def note(self, target: Tensor) -> None:
        """`target`, of a piece, has been filled."""
        owner = self._owners[target.untyped_storage().data_ptr()]
        self._num_missing[owner] -= target.numel()
        if self._num_missing[owner] == 0:
            self._then(owner)


def load_weights(
    files: Sequence[Path],
    pieces: Iterable[WeightShard],
    ignored: Callable[[str], bool],
    on_bytes: Callable[[int], None] = lambda _: None,
    on_filled: Callable[[Tensor], None] = lambda _: None,
) -> None:
    """Fill every piece's target from the safetensors files, one tensor in memory at a time.

    pieces: an iterator, if no target is to be kept in memory by it. ignored: whether a tensor that no piece names is
    known and not needed. on_bytes: told the size of each tensor read. on_filled: given each target when it is filled,
    for the last time.
    Raises CheckpointError naming the first missing, surplus or misshapen tensor; parameters may then be half filled.
    """
    expected = _by_source(pieces)
    seen: set[str] = set()
    for file in files:
        try:
            _load_file(file, expected, seen, ignored, on_bytes, on_filled)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    missing = sorted(expected)
    if missing:
        raise CheckpointError(f"the checkpoint lacks tensor {missing[0]}{_and_more(len(missing) - 1)}")


def _by_source(pieces: Iterable[WeightShard]) -> dict[str, list[WeightShard]]:
    by_source: dict[str, list[WeightShard]] = {}
    for piece in pieces:
        by_source.setdefault(piece.source, []).append(piece)
    return by_source


def _load_file(
    file: Path,
    expected: dict[str, list[WeightShard]],
    seen: set[str],
    ignored: Callable[[str], bool],
    on_bytes: Callable[[int], None],
    on_filled: Callable[[Tensor], None],
) -> None:
    """Takes what it loads out of `expected`, and puts the names into `seen`."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        # In file order, so that a disk is read from one end to the other.
        for name in tensors.offset_keys():
            if name in seen:
                raise CheckpointError(f"tensor {name} is in the checkpoint twice, the second time in {file.name}")
            if name not in expected:
                if ignored(name):
                    continue
                raise CheckpointError(f"{file.name} has tensor {name}, which this model has no place for")
            seen.add(name)
            view = tensors.get_slice(name)
            for piece in expected.pop(name):
                shape = tuple(view.get_shape())
                if shape != piece.shape:
                    raise CheckpointError(f"tensor {name} has shape {shape}, but config.json makes it {piece.shape}")
                if piece.target is None:
                    continue
                shard = view[piece.shard]
                with torch.no_grad():
                    piece.target.copy_(shard)  # by all threads of torch, each of which reads its part of the file
                on_bytes(shard.nbytes)
                on_filled(piece.target)


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""
