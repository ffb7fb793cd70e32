"""Open files of a checkpoint, in safetensors format or GGUF, which give parts of their tensors.

A shard is a slice for each dimension of a tensor. Quantised blocks become float32; other numbers keep their dtype.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokasaurus.checkpoint.gguf.blocks import MappedTensors
from tokasaurus.checkpoint.gguf.header import TYPES
from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.json_files import unreadable
from tokasaurus.checkpoint.quantized.config import Quantization
from tokasaurus.checkpoint.quantized.numbers import QuantizedReader
from tokasaurus.checkpoint.quantized.tensors import QuantizedTensor
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.checkpoint.weight_files import read_tensors
from tokasaurus.model.cpu.bindings import BLOCK_TYPES as MULTIPLIED_TYPES
from tokasaurus.model.cpu.layer_executor import BlockRows

_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEQUANTIZED_DTYPES = frozenset(_PLAIN_TYPES.values())
"""dtypes of the parts that a file with quantised tensors yields; the norms of a GGUF file are always float32."""
_PART_NUMBERS = 1 << 24
"""Most numbers that a part of a dequantised shard has: 64 MiB."""


class TensorFile(Protocol):
    """One open file. Tensors have their names in Hugging Face format."""

    @property
    def path(self) -> Path: ...

    def names(self) -> Sequence[str]:
        """Names of the tensors, in the order in which they lie in the file."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Bytes of the whole tensor in the file."""

    def block_type(self, name: str) -> str | None:
        """Type of a quantised tensor's blocks, such as "Q4_1"; None if its numbers are plain."""

    def parts(self, name: str, shard: tuple[slice, ...]) -> Iterator[tuple[slice, Tensor]]:
        """The shard in parts of bounded memory, each after the indices that it has in the shard's first dimension. A
        single number is a vector of one.

        Raises CheckpointError if a number of a quantised tensor is not finite."""

    def shard_blocks(self, name: str, shard: tuple[slice, ...]) -> BlockRows | None:
        """The shard in blocks that the CPU kernels multiply by; None if it is no such shard. Of experts that are stored
        together, it is of one.

        Raises CheckpointError if a scale of a quantised tensor is not finite."""


def has_quantized(files: Sequence[Path], quantization: Quantization | None) -> bool:
    """Whether weights in the files are quantised. Other arguments and errors as of open_files."""
    return any(file.block_type(name) is not None for file in open_files(files, quantization) for name in file.names())


def read_shard(file: TensorFile, name: str, shard: tuple[slice, ...]) -> Tensor:
    """The whole shard in one tensor."""
    num_rows = len(range(*shard[0].indices(file.shape(name)[0]))) if shard else 1
    whole: Tensor | None = None
    for rows, part in file.parts(name, shard):
        if len(part) == num_rows:
            return part
        if whole is None:
            whole = part.new_empty((num_rows, *part.shape[1:]))
        whole[rows] = part
    assert whole is not None
    return whole


def open_files(files: Sequence[Path], quantization: Quantization | None = None) -> Iterator[TensorFile]:
    """Each file in turn, open until the next one. files and quantization: as of `read_tensors`.

    Raises CheckpointError if a file is not readable."""
    if is_gguf(files[0]):
        tensors = read_tensors(files)
        for path in files:
            with GGUFFile(path, {name: tensor for name, tensor in tensors.items() if tensor.file == path}) as file:
                yield file
        return
    tensors = {} if quantization is None else read_tensors(files, quantization)
    with closing(QuantizedReader(torch.get_num_threads())) as reader:
        for path in files:
            with _readable(path):
                opened = safe_open(path, framework="pt", device="cpu")
            with opened as content:
                found = read_tensors([path]) if quantization is None else tensors
                in_file = {name: tensor for name, tensor in found.items() if tensor.file == path}
                yield _SafetensorsFile(path, content, in_file, reader)


class _SafetensorsFile:
    def __init__(self, path: Path, content: Any, tensors: Mapping[str, StoredTensor], reader: QuantizedReader) -> None:
        """content: what safe_open gives. tensors: of this file, by name. reader: of quantised weights."""
        self.path = path
        self._content = content
        self._tensors = tensors
        self._reader = reader

    def names(self) -> Sequence[str]:
        return sorted(self._tensors, key=lambda name: self._tensors[name].begin)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def num_bytes(self, name: str) -> int:
        tensor = self._tensors[name]
        return tensor.num_bytes if isinstance(tensor, QuantizedTensor) else tensor.end - tensor.begin

    def block_type(self, name: str) -> str | None:
        tensor = self._tensors[name]
        return self._reader.block_type(name, tensor) if isinstance(tensor, QuantizedTensor) else None

    def parts(self, name: str, shard: tuple[slice, ...]) -> Iterator[tuple[slice, Tensor]]:
        tensor = self._tensors[name]
        if isinstance(tensor, QuantizedTensor) and tensor.is_stack:
            experts, columns, rows = shard
            for index, expert in enumerate(range(tensor.shape[0])[experts]):
                found = self._reader.dequantized(name, tensor.matrix(expert), rows, columns)
                yield slice(index, index + 1), torch.from_numpy(found.T[None])
            return
        if isinstance(tensor, QuantizedTensor):
            rows, columns = shard
            for indices, some in _row_parts(rows, *tensor.shape):
                yield indices, torch.from_numpy(self._reader.dequantized(name, tensor, some, columns))
            return
        with _readable(self.path):
            data = self._content.get_slice(tensor.name_in_file or name)[shard]  # stays in the file until it is used
        yield slice(None), data if shard else data.reshape(1)

    def shard_blocks(self, name: str, shard: tuple[slice, ...]) -> BlockRows | None:
        tensor = self._tensors[name]
        if not isinstance(tensor, QuantizedTensor):
            return None
        if tensor.is_stack:
            experts, columns, rows = shard
            (expert,) = range(tensor.shape[0])[experts]
            tensor = tensor.matrix(expert)
        else:
            rows, columns = shard
        found = self._reader.blocks(name, tensor, rows, columns)
        return None if found is None else BlockRows(found[0], torch.from_numpy(found[1]))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise unreadable(path, "safetensors", error) from error


class GGUFFile:
    """A TensorFile that also gives the blocks of quantised tensors."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """tensors: of this file, by name. Raises CheckpointError if it cannot be opened."""
        self.path = path
        self._tensors = tensors
        try:
            self._mapped = MappedTensors(path, tensors, torch.get_num_threads())
        except OSError as error:
            raise unreadable(path, "GGUF", error) from None

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.close()

    def names(self) -> Sequence[str]:
        return sorted(self._tensors, key=lambda name: self._tensors[name].begin)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def num_bytes(self, name: str) -> int:
        return self._tensors[name].end - self._tensors[name].begin

    def block_type(self, name: str) -> str | None:
        kind = self._tensors[name].dtype
        return None if kind in _PLAIN_TYPES else kind

    def blocks(self, name: str, rows: slice) -> tuple[str, Tensor]:
        """The type, such as "Q4_1", and rows as they are stored, uint8 [rows, bytes per row]: in the file until they
        are used, unless it has them in another order. name: of a tensor whose type is in BLOCK_TYPES.

        Raises CheckpointError if a scale of a quantised tensor is not finite."""
        return self._tensors[name].dtype, torch.from_numpy(self._mapped.blocks(name, rows))

    def shard_blocks(self, name: str, shard: tuple[slice, ...]) -> BlockRows | None:
        tensor = self._tensors[name]
        if tensor.dtype not in MULTIPLIED_TYPES or len(shard) != 2:
            return None
        _, block_elements, block_bytes = TYPES[tensor.dtype]
        begin, end, _ = shard[1].indices(tensor.shape[1])
        if begin % block_elements or end % block_elements:  # a block belongs to two ranks
            return None
        _, blocks = self.blocks(name, shard[0])
        columns = slice(begin // block_elements * block_bytes, end // block_elements * block_bytes)
        return BlockRows(tensor.dtype, blocks[:, columns].contiguous())

    def parts(self, name: str, shard: tuple[slice, ...]) -> Iterator[tuple[slice, Tensor]]:
        tensor = self._tensors[name]
        *leading, columns = shard  # a vector is a matrix with one row
        rows = leading[0] if leading else slice(None)
        dtype = _PLAIN_TYPES.get(tensor.dtype)
        if dtype is not None:
            stored = torch.from_numpy(self._mapped.stored_rows(name, rows)).view(dtype)[:, columns]
            yield slice(None), stored if leading else stored[0]
            return
        for indices, some in _row_parts(rows, prod(tensor.shape[:-1]), tensor.shape[-1]):
            part = torch.from_numpy(self._mapped.dequantized(name, some, columns))
            yield (indices, part) if leading else (slice(None), part[0])


def _row_parts(rows: slice, num_rows: int, row_size: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a shard of a matrix [num_rows, row_size]: their rows within the shard, and within the matrix. There is
    at least one part."""
    begin, end, _ = rows.indices(num_rows)
    step = max(1, _PART_NUMBERS // row_size)
    for start in range(begin, max(end, begin + 1), step):
        some = slice(start, min(start + step, end))
        yield slice(start - begin, some.stop - begin), some
