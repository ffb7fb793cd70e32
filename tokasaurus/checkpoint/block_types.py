"""Rows of quantised weights in blocks: GGUF's, named as there, and blocks of integers with a scale.

A block of I4_64 has 64 adjacent inputs: their scale and min, float32, then 32 bytes, each with the code of an input in
the low bits and of the next one in the high bits; weight = scale * code + min. A block of I8 has all inputs of an
output: their scale, float32, then a byte for each, weight = scale * (byte - 128).
"""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.gguf.blocks import dequantize_rows as dequantize_gguf_rows
from tokasaurus.checkpoint.gguf.header import TYPES as GGUF_TYPES

I4_GROUPS = {"I4_32": 32, "I4_64": 64, "I4_128": 128}
"""Inputs of a block, by type."""
I8 = "I8"
I8_INPUTS = 32
"""What the number of inputs of a row of I8 must be a multiple of, for the kernels."""
_FLOAT_BYTES = 4


_ORDERED = " in the order of activations"


def ordered(type_name: str) -> str:
    """Name for the user of a type whose inputs are in groups in an order of their own."""
    return type_name + _ORDERED


def why_dequantised(type_name: str) -> str:
    """What the CPU kernels need that weights of this type lack, where they multiply by others."""
    if type_name.endswith(_ORDERED):
        return "the kernels need groups of adjacent inputs"
    if type_name.startswith(f"{I8}_"):
        return "the kernels need one scale for each output"
    if type_name == I8:
        return f"the kernels need 8 bits without zero points, and inputs by the {I8_INPUTS}"
    if type_name in GGUF_TYPES:
        return "the kernels need types that they multiply by, in whole blocks on each rank"
    return f"the kernels need groups of {min(I4_GROUPS.values())} inputs or more, whole on each rank"


def bytes_of_row(type_name: str, num_inputs: int) -> int:
    """Bytes of a row in blocks."""
    if type_name == I8:
        return _FLOAT_BYTES + num_inputs
    if type_name in GGUF_TYPES:
        kind = GGUF_TYPES[type_name]
        return num_inputs // kind.block_elements * kind.block_bytes
    group = I4_GROUPS[type_name]
    return num_inputs // group * (2 * _FLOAT_BYTES + group // 2)


def inputs_of_row(type_name: str, row_bytes: int) -> int:
    """How many weights a row of so many bytes has."""
    if type_name == I8:
        return row_bytes - _FLOAT_BYTES
    if type_name in I4_GROUPS:
        group = I4_GROUPS[type_name]
        return row_bytes // bytes_of_row(type_name, group) * group
    kind = GGUF_TYPES[type_name]
    return row_bytes // kind.block_bytes * kind.block_elements


def dequantize_rows(blocks: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """[rows, bytes], contiguous -> float32 [rows, inputs], each rounded once. Takes several times the result's
    memory."""
    num_rows = len(blocks)
    if type_name == I8:
        scales = blocks[:, :_FLOAT_BYTES].copy().view(np.float32)
        whole: NDArray[np.float32] = scales * (blocks[:, _FLOAT_BYTES:].astype(np.float32) - 128)
        return whole
    if type_name in I4_GROUPS:
        each = blocks.reshape(num_rows, -1, bytes_of_row(type_name, I4_GROUPS[type_name]))
        numbers = each[:, :, : 2 * _FLOAT_BYTES].copy().view(np.float32).astype(np.float64)
        codes = unpack_4_bits(each[:, :, 2 * _FLOAT_BYTES :])
        weights: NDArray[np.float32] = (codes * numbers[:, :, :1] + numbers[:, :, 1:]).astype(np.float32)
        return weights.reshape(num_rows, -1)
    return dequantize_gguf_rows(blocks, type_name)


def pack_i8_rows(scales: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """scales [rows, 1], codes [rows, inputs] -> blocks of I8, [rows, bytes]."""
    return np.concatenate((scales.view(np.uint8), codes), axis=1)


def pack_i4_rows(
    scales: NDArray[np.float32], mins: NDArray[np.float32], code_bytes: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """scales and mins [rows, groups], code_bytes [rows, inputs / 2] -> blocks of I4, [rows, bytes]."""
    numbers = np.stack((scales, mins), axis=2).view(np.uint8)
    both = code_bytes.reshape(*scales.shape, -1)
    return np.concatenate((numbers, both), axis=2).reshape(len(scales), -1)


def pack_mxfp4_rows(exponents: NDArray[np.uint8], code_bytes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """exponents [rows, groups], code_bytes [rows, inputs / 2] of adjacent inputs -> blocks of GGUF, [rows, bytes], in
    whose bytes are inputs half a block apart."""
    codes = unpack_4_bits(code_bytes.reshape(*exponents.shape, -1))
    first, second = np.split(codes, 2, axis=2)
    return np.concatenate((exponents[:, :, None], first | second << 4), axis=2).reshape(len(exponents), -1)


def unpack_4_bits(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., bytes] -> [..., codes]: of each byte the low bits, then the high bits."""
    codes = np.empty((*stored.shape, 2), np.uint8)
    np.bitwise_and(stored, 0xF, out=codes[..., 0])
    np.right_shift(stored, 4, out=codes[..., 1])
    return codes.reshape(*stored.shape[:-1], -1)
