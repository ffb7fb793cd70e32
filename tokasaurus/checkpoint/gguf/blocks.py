"""The numbers of a GGUF model's tensors: blocks as they are stored, and dequantised.

In the shapes below, a vector is a matrix of one row.
"""

import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.gguf.header import TYPES
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.stored_tensors import StoredTensor

_PART_ELEMENTS = 1 << 18
"""Numbers that a thread dequantises at once, which takes several times their memory."""

_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Offsets of a block's float16 scales, by type."""
MXFP4_MAX_EXPONENT = 252
"""Of a block of MXFP4, its first byte: with more, numbers would not be finite."""
BLOCK_TYPES = frozenset(_SCALES)
"""Types whose scales `blocks` checks."""


class MappedTensors:
    """The tensors of one open file. Arrays of it stay valid after `close`."""

    def __init__(self, file: Path, tensors: Mapping[str, StoredTensor], num_threads: int) -> None:
        """tensors: of this file, as its header describes them. num_threads: which dequantise. Raises OSError."""
        with file.open("rb") as opened:
            # Changes of the array would stay in memory: torch takes no array that cannot be changed.
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._content = np.frombuffer(mapped, np.uint8)
        self._tensors = tensors
        self._pool = ThreadPoolExecutor(num_threads, "dequantize")

    def close(self) -> None:
        self._pool.shutdown()

    def stored_rows(self, name: str, rows: slice) -> NDArray[np.uint8]:
        """uint8 [rows, bytes per row], rows in Hugging Face order: in the file, or copied if it has another order."""
        tensor = self._tensors[name]
        num_rows = prod(tensor.shape[:-1])
        stored = self._content[tensor.begin : tensor.end].reshape(num_rows, -1)
        if tensor.added:
            stored = (stored.view(np.float32) - np.float32(tensor.added)).view(np.uint8)
        if tensor.interleaved_head:
            is_vector = len(tensor.shape) == 1  # of as many rows as it has numbers, in the file's order
            order = unpermuted_rows(tensor.shape[0], tensor.interleaved_head)
            if not is_vector:
                return np.asarray(stored[order[rows]])
            stored = stored.reshape(len(order), -1)[order].reshape(1, -1)
        return stored[rows]

    def blocks(self, name: str, rows: slice) -> NDArray[np.uint8]:
        """uint8 [rows, bytes per row] of a tensor with a type in BLOCK_TYPES, in Hugging Face order.

        Raises CheckpointError if a scale of a block is not finite."""
        stored, tensor = self.stored_rows(name, rows), self._tensors[name]
        kind = TYPES[tensor.dtype]
        each = stored.reshape(len(stored), tensor.shape[-1] // kind.block_elements, kind.block_bytes)
        for offset in _SCALES[tensor.dtype]:
            # A float16 with all bits of the exponent is infinite or not a number.
            if ((each[:, :, offset + 1] & 0x7C) == 0x7C).any():
                raise _not_finite(name)
        if tensor.dtype == "MXFP4" and (each[:, :, 0] > MXFP4_MAX_EXPONENT).any():
            raise _not_finite(name)
        return stored

    def dequantized(self, name: str, rows: slice, columns: slice) -> NDArray[np.float32]:
        """float32 [rows, columns], rows in Hugging Face order. Raises CheckpointError if a number is not finite."""
        tensor, stored = self._tensors[name], self.stored_rows(name, rows)
        begin, end, _ = columns.indices(tensor.shape[-1])
        _, block_elements, block_bytes = TYPES[tensor.dtype]
        first, last = begin // block_elements, -(-end // block_elements)
        stored = stored[:, first * block_bytes : last * block_bytes]
        wanted = slice(begin - first * block_elements, end - first * block_elements)
        result = np.empty((len(stored), end - begin), np.float32)
        num_rows = max(1, _PART_ELEMENTS // max(1, (last - first) * block_elements))

        def compute(start: int) -> None:
            part = stored[start : start + num_rows]
            found = dequantize_rows(np.ascontiguousarray(part), tensor.dtype)
            if not np.isfinite(found).all():
                raise _not_finite(name)
            result[start : start + num_rows] = found[:, wanted]

        for _ in self._pool.map(compute, range(0, len(stored), num_rows)):
            pass
        return result


def dequantize_rows(blocks: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """[rows, bytes], contiguous -> float32 [rows, elements]. Takes several times the result's memory."""
    from gguf import GGMLQuantizationType, dequantize  # only for models that have such weights

    with np.errstate(all="ignore"):
        # All blocks as one row: the library computes only 16 rows at a time.
        found: NDArray[np.float32] = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[type_name])
    return found.reshape(len(blocks), -1)


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} has blocks whose scales are not finite")


def unpermuted_rows(num_rows: int, head_size: int) -> NDArray[np.intp]:
    """Index in a GGUF file of each row of a Llama q or k matrix in Hugging Face order.

    Rotary embedding pairs adjacent dimensions (0, 1), (2, 3), … in GGUF, but i and i + head_size / 2 in Hugging Face.
    """
    rows: NDArray[np.intp] = np.arange(num_rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows
