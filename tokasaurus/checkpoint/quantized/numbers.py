"""The numbers of quantised weights: codes, zeros and scales as they are stored, and the weights that they mean.

In the shapes below: O outputs, I inputs, G groups of inputs.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.block_types import (
    I4_GROUPS,
    I8,
    I8_INPUTS,
    bytes_of_row,
    ordered,
    pack_i4_rows,
    pack_i8_rows,
    pack_mxfp4_rows,
    unpack_4_bits,
)
from tokasaurus.checkpoint.gguf.blocks import MXFP4_MAX_EXPONENT
from tokasaurus.checkpoint.json_files import CheckpointError, unreadable
from tokasaurus.checkpoint.quantized.config import Layout
from tokasaurus.checkpoint.quantized.tensors import QuantizedTensor
from tokasaurus.checkpoint.stored_tensors import StoredTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 adjacent outputs has its code in the lowest 4 bits of a word of AWQ, which in the next 4 bits, and so on.
Source: WQLinear_GEMM of autoawq."""
_WORD_OUTPUTS = 8
"""Outputs of a word of AWQ."""
_NO_GROUP = -1
"""Old versions of compressed-tensors store it for every input, where groups are of adjacent ones."""
_I8_ZERO = 128
_MXFP4_ZERO = 12
_MXFP4_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
_MXFP4_CODES = np.array([_MXFP4_ZERO + sign * twice for sign in (1, -1) for twice in _MXFP4_TWICE], np.uint8)
"""Of each 4 bits, twice their number as a code. Source: OCP Microscaling Formats 1.0."""
_MXFP4_HALF_BIAS = 128
"""What an exponent has more than that of half its block's scale, by which such codes are multiplied."""
_PART_ELEMENTS = 1 << 18
"""Numbers that a thread dequantises at once, which takes several times their memory."""

_DTYPES: dict[str, Any] = {"U8": np.uint8, "I8": np.int8, "I32": np.dtype("<u4"), "I64": np.dtype("<i8")}
_DTYPES |= {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class QuantizedReader:
    """Reads quantised weights from files, which are opened when they are first needed."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: which dequantise."""
        self._contents: dict[Path, NDArray[np.uint8]] = {}
        self._pool = ThreadPoolExecutor(num_threads, "dequantize")

    def close(self) -> None:
        self._pool.shutdown()
        self._contents.clear()

    def dequantized(self, name: str, tensor: QuantizedTensor, rows: slice, columns: slice) -> NDArray[np.float32]:
        """float32 [rows, columns] of the weight [O, I], each number rounded once.

        name: of the weight, for errors. Raises CheckpointError if a scale is not finite, an input's group does not
        exist, or a file cannot be read."""
        groups = self._groups_of_inputs(name, tensor)
        first_row, last_row, _ = rows.indices(tensor.shape[0])
        scales = self._scales(name, tensor)[first_row:last_row]
        zeros = self._zeros(tensor)[first_row:last_row]
        first, last, _ = columns.indices(tensor.shape[1])
        result = np.empty((last_row - first_row, last - first), np.float32)

        def compute(some: slice) -> None:
            codes = self._codes(tensor, first_row + some.start, first_row + some.stop)
            if groups is None:
                grouped = codes.reshape(len(codes), tensor.num_groups, -1).astype(np.float32)
                some_zeros, some_scales = zeros[some, :, None], scales[some, :, None]
            else:
                grouped = codes.astype(np.float32)
                some_zeros, some_scales = zeros[some][:, groups], scales[some][:, groups]
            grouped -= some_zeros
            with np.errstate(over="ignore"):
                grouped *= some_scales
            if not np.isfinite(grouped).all():
                raise CheckpointError(f"tensor {name} has numbers that are not finite")
            result[some] = grouped.reshape(codes.shape)[:, first:last]

        self._for_parts(compute, len(result), tensor.shape[1])
        return result

    def blocks(
        self, name: str, tensor: QuantizedTensor, rows: slice, columns: slice
    ) -> tuple[str, NDArray[np.uint8]] | None:
        """The shard in blocks: their type, and rows, as `block_types` describes them. None if it has no such blocks.
        Raises CheckpointError as `dequantized`."""
        (first, last, _), (first_row, last_row, _) = columns.indices(tensor.shape[1]), rows.indices(tensor.shape[0])
        group_size, num_bits = tensor.shape[1] // tensor.num_groups, tensor.quantization.num_bits
        scales, zeros = self._scales(name, tensor)[first_row:last_row], self._zeros(tensor)[first_row:last_row]
        if tensor.quantization.layout is Layout.MXFP4:
            return self._mxfp4_blocks(tensor, slice(first_row, last_row), slice(first, last))
        largest = 128 if num_bits == 8 else 15
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(scales * np.float32(largest)).all()
        if not is_finite or self._groups_of_inputs(name, tensor) is not None:
            return None
        if num_bits == 8:
            if tensor.num_groups > 1 or (zeros != _I8_ZERO).any() or (last - first) % I8_INPUTS:
                return None
            kind, row_bytes = I8, bytes_of_row(I8, last - first)
        else:
            fitting = [
                kind for kind, size in I4_GROUPS.items() if not any(each % size for each in (group_size, first, last))
            ]
            if not fitting:
                return None
            kind = fitting[-1]
            row_bytes = bytes_of_row(kind, last - first)
            groups = np.arange(first, last, I4_GROUPS[kind]) // group_size
            scales, zeros = scales[:, groups], zeros[:, groups]
        result = np.empty((last_row - first_row, row_bytes), np.uint8)

        def compute(some: slice) -> None:
            codes = self._code_bytes(tensor, first_row + some.start, first_row + some.stop)
            codes = codes[:, first * num_bits // 8 : last * num_bits // 8]
            if kind == I8:
                result[some] = pack_i8_rows(scales[some], codes)
            else:
                result[some] = pack_i4_rows(scales[some], -scales[some] * zeros[some], codes)

        self._for_parts(compute, len(result), tensor.shape[1])
        return kind, result

    def _mxfp4_blocks(
        self, tensor: QuantizedTensor, rows: slice, columns: slice
    ) -> tuple[str, NDArray[np.uint8]] | None:
        group_size = tensor.shape[1] // tensor.num_groups
        if columns.start % group_size or columns.stop % group_size:  # a block belongs to two ranks
            return None
        groups = slice(columns.start // group_size, columns.stop // group_size)
        exponents = self._content(tensor.scales)[rows, groups]
        codes = self._content(tensor.codes)[rows, columns.start // 2 : columns.stop // 2]
        result = np.empty((len(codes), bytes_of_row("MXFP4", columns.stop - columns.start)), np.uint8)

        def compute(some: slice) -> None:
            result[some] = pack_mxfp4_rows(exponents[some], codes[some])

        self._for_parts(compute, len(result), tensor.shape[1])
        return "MXFP4", result

    def stored_bytes(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """The tensor's bytes, which stay in the file until they are used. Raises CheckpointError if it cannot be
        read."""
        file = tensor.file
        try:
            if file not in self._contents:
                with file.open("rb") as opened:
                    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                self._contents[file] = np.frombuffer(mapped, np.uint8)
        except (OSError, ValueError) as error:
            raise unreadable(file, "safetensors", error) from None
        return self._contents[file][tensor.begin : tensor.end]

    def block_type(self, name: str, tensor: QuantizedTensor) -> str:
        """Name of the blocks' type for the user."""
        is_ordered = self._groups_of_inputs(name, tensor) is not None
        return ordered(tensor.dtype) if is_ordered else tensor.dtype

    def _for_parts(self, compute: Callable[[slice], None], num_rows: int, row_size: int) -> None:
        """Call `compute` in threads with all rows, some at a time."""
        step = -(-max(1, _PART_ELEMENTS // row_size) // _WORD_OUTPUTS) * _WORD_OUTPUTS
        parts = (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
        for _ in self._pool.map(compute, parts):
            pass

    def _content(self, tensor: StoredTensor) -> NDArray[Any]:
        """The tensor as it is stored, in its shape."""
        content = self.stored_bytes(tensor)
        try:
            numbers: NDArray[Any] = content.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        except ValueError as error:  # changed since its header was read
            raise unreadable(tensor.file, "safetensors", error) from None
        return numbers

    def _scales(self, name: str, tensor: QuantizedTensor) -> NDArray[np.float32]:
        """[O, G]."""
        stored = np.atleast_1d(self._content(tensor.scales))
        if tensor.quantization.layout is Layout.MXFP4:
            if (stored > MXFP4_MAX_EXPONENT).any():
                raise CheckpointError(f"tensor {name} has scales that are not finite")
            halves: NDArray[np.float32] = np.ldexp(np.float32(1), stored.astype(np.int32) - _MXFP4_HALF_BIAS)
            return halves
        if tensor.scales.dtype == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        scales = stored.astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"tensor {name} has scales that are not finite")
        if tensor.quantization.layout in (Layout.AWQ, Layout.GPTQ):
            return np.ascontiguousarray(scales.T)
        return np.broadcast_to(scales.reshape(-1, tensor.num_groups), (tensor.shape[0], tensor.num_groups))

    def _zeros(self, tensor: QuantizedTensor) -> NDArray[np.uint8]:
        """[O, G]."""
        quantization, shape = tensor.quantization, (tensor.shape[0], tensor.num_groups)
        if quantization.layout is Layout.MXFP4:
            return np.full(shape, _MXFP4_ZERO, np.uint8)
        if tensor.zeros is None:
            return np.full(shape, 1 << (quantization.num_bits - 1), np.uint8)
        stored = self._content(tensor.zeros)
        if quantization.layout.has_int8:
            zeros = _unsigned(stored).reshape(-1, tensor.num_groups)
            return np.broadcast_to(zeros, shape)
        if quantization.layout is Layout.PACKED:
            return np.ascontiguousarray(_unpack_rows(stored.T, quantization.num_bits)[:, : shape[0]].T)
        if quantization.layout is Layout.AWQ:
            return np.ascontiguousarray(_unpack_awq(stored).T)
        # The offset is one number for all codes of a word, as gptqmodel converts zeros from one format to the other.
        offset = sum(quantization.stored_zero_offset << bit for bit in range(0, 32, quantization.num_bits))
        stored = stored + np.uint32(offset)
        return np.ascontiguousarray(_unpack_rows(stored, quantization.num_bits).T)

    def _groups_of_inputs(self, name: str, tensor: QuantizedTensor) -> NDArray[np.int64] | None:
        """[I], the number of each input's group; None if groups are of adjacent inputs, in order."""
        if tensor.group_indices is None:
            return None
        stored = self._content(tensor.group_indices)
        groups = (stored.view(np.int32) if tensor.group_indices.dtype == "I32" else stored).astype(np.int64)
        if (groups == _NO_GROUP).all() and not tensor.quantization.has_order:
            return None
        if groups.min() < 0 or groups.max() >= tensor.num_groups:
            raise CheckpointError(f"tensor {name} has inputs in groups below 0 or from {tensor.num_groups} on")
        num_inputs = tensor.shape[1]
        in_order = np.arange(num_inputs) // (num_inputs // tensor.num_groups)
        return None if (groups == in_order).all() else groups

    def _codes(self, tensor: QuantizedTensor, first: int, last: int) -> NDArray[np.uint8]:
        """[outputs from first until last, I], from 0 on."""
        stored = self._code_bytes(tensor, first, last)
        if tensor.quantization.layout is Layout.MXFP4:
            found: NDArray[np.uint8] = _MXFP4_CODES[unpack_4_bits(stored)]
            return found
        return (stored if tensor.quantization.num_bits == 8 else unpack_4_bits(stored))[:, : tensor.shape[1]]

    def _code_bytes(self, tensor: QuantizedTensor, first: int, last: int) -> NDArray[np.uint8]:
        """[outputs from first until last, bytes]: the codes of adjacent inputs, from the lowest bits on. There may be
        padding at the end."""
        layout, stored = tensor.quantization.layout, self._content(tensor.codes)
        if layout.has_int8:
            return _unsigned(stored[first:last])
        if layout in (Layout.PACKED, Layout.MXFP4):
            return _as_bytes(stored[first:last])
        if layout is Layout.GPTQ:
            return _as_bytes(stored[:, first:last].T)
        first_word = first // _WORD_OUTPUTS
        both = _awq_rows(stored[:, first_word : -(-last // _WORD_OUTPUTS)])
        return both[first - first_word * _WORD_OUTPUTS : last - first_word * _WORD_OUTPUTS]


def _awq_rows(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """[I, O / 8] -> [O, I / 2]: in each byte the codes of two adjacent inputs."""
    of_outputs = np.ascontiguousarray(words.T)
    even, odd, low_bits = of_outputs[:, 0::2], of_outputs[:, 1::2], np.uint32(0x0F0F0F0F)
    halves = ((even & low_bits) | (odd & low_bits) << 4, (even >> 4 & low_bits) | (odd & ~low_bits))
    rows = np.empty((len(of_outputs), _WORD_OUTPUTS, even.shape[1]), np.uint8)
    for index, output in enumerate(AWQ_ORDER):
        rows[:, output] = halves[index % 2].view(np.uint8).reshape(*even.shape, 4)[:, :, index // 2]
    return rows.reshape(-1, even.shape[1])


def _as_bytes(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """[N, words] -> [N, bytes], from the lowest bits on."""
    return np.ascontiguousarray(words).view(np.uint8)


def _unsigned(stored: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes from 0 on of codes from -128 on."""
    unsigned: NDArray[np.uint8] = stored.view(np.uint8) ^ np.uint8(0x80)
    return unsigned


def _unpack_rows(words: NDArray[np.uint32], num_bits: int) -> NDArray[np.uint8]:
    """[N, words] -> [N, codes]: adjacent codes from the lowest bits on."""
    stored = _as_bytes(words)
    return stored if num_bits == 8 else unpack_4_bits(stored)


def _unpack_awq(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """[N, O / 8] -> [N, O]."""
    codes = np.empty((*words.shape, _WORD_OUTPUTS), np.uint8)
    for index, output in enumerate(AWQ_ORDER):
        codes[:, :, output] = words >> np.uint32(4 * index) & np.uint32(0xF)
    return codes.reshape(len(words), -1)
