"""Random blocks of quantised weights."""

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from tokasaurus.model.cpu.layer_executor import BlockRows

# Where a block has float16 numbers: its scale, and its min if it has one.
_NUMBER_OFFSETS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
}


_CODES = {
    **{"Q4_0": slice(2, None), "Q4_1": slice(4, None), "Q5_0": slice(2, None), "Q5_1": slice(4, None)},
    **{
        "Q8_0": slice(2, None),
        "Q4_K": slice(16, None),
        "Q5_K": slice(16, None),
        "Q6_K": slice(0, 192),
        "MXFP4": slice(1, None),
    },
}
"""Where a block has codes."""

_GROUPS = {"I4_32": 32, "I4_64": 64, "I4_128": 128}
"""Inputs of a block of the types that no GGUF file has."""
_I8_UNIT = 32


def block_size(block_type: str) -> int:
    """Inputs of a block; of I8, whose blocks have all inputs, what their number must be a multiple of."""
    if block_type == "I8":
        return _I8_UNIT
    if block_type in _GROUPS:
        return _GROUPS[block_type]
    return int(GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]][0])


def random_block_rows(block_type: str, num_rows: int, num_blocks: int, seed: int = 0) -> BlockRows:
    """Every bit of the codes and of the small scales is random; the float16 numbers are those of usual weights."""
    if block_type == "I8":
        return _random_floats_and_codes(block_type, (num_rows, 1), 1, num_blocks * _I8_UNIT, seed)
    if block_type in _GROUPS:
        return _random_floats_and_codes(block_type, (num_rows, num_blocks), 2, _GROUPS[block_type] // 2, seed)
    num_bytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]][1]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows, num_blocks, num_bytes), np.uint8)
    if block_type == "MXFP4":
        blocks[:, :, 0] = generator.integers(118, 126, (num_rows, num_blocks))  # an exponent
    for offset in _NUMBER_OFFSETS[block_type]:
        numbers = generator.normal(0, 0.05, (num_rows, num_blocks, 1)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = numbers.view(np.uint8)
    return BlockRows(block_type, torch.from_numpy(blocks.reshape(num_rows, -1)))


def _random_floats_and_codes(
    block_type: str, shape: tuple[int, int], num_floats: int, num_bytes: int, seed: int
) -> BlockRows:
    generator = np.random.default_rng(seed)
    numbers = generator.normal(0, 0.05, (*shape, num_floats)).astype(np.float32).view(np.uint8)
    codes = generator.integers(0, 256, (*shape, num_bytes), np.uint8)
    return BlockRows(block_type, torch.from_numpy(np.concatenate((numbers, codes), axis=2).reshape(shape[0], -1)))


def plain_rows(rows: BlockRows) -> Tensor:
    """float32 [rows, inputs]: as the descriptions of the types say."""
    if rows.type not in (*_GROUPS, "I8"):
        return rows.dequantized()
    num_rows = len(rows.blocks)
    if rows.type == "I8":
        return rows.blocks[:, :4].contiguous().view(torch.float32) * (rows.blocks[:, 4:].float() - 128)
    blocks = rows.blocks.view(num_rows, -1, 8 + _GROUPS[rows.type] // 2)
    numbers = blocks[:, :, :8].contiguous().view(torch.float32)
    codes = torch.stack((blocks[:, :, 8:] & 15, blocks[:, :, 8:] >> 4), dim=3).view(num_rows, -1, _GROUPS[rows.type])
    scales, mins = (numbers[:, :, i : i + 1].double() for i in (0, 1))
    return (codes.double() * scales + mins).float().view(num_rows, -1)


def set_codes(rows: BlockRows, byte: int) -> BlockRows:
    """The same scales and mins, with `byte` in all bytes that have codes."""
    if rows.type == "I8":
        blocks = rows.blocks.clone()
        blocks[:, 4:] = byte if byte else 1  # -127, as no larger magnitude is written
        return BlockRows(rows.type, blocks)
    if rows.type in _GROUPS:
        blocks = rows.blocks.clone().view(len(rows.blocks), -1, 8 + _GROUPS[rows.type] // 2)
        blocks[:, :, 8:] = byte
        return BlockRows(rows.type, blocks.flatten(1))
    num_bytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[rows.type]][1]
    blocks = rows.blocks.clone().view(len(rows.blocks), -1, num_bytes)
    blocks[:, :, _CODES[rows.type]] = byte
    if rows.type == "Q8_0" and not byte:
        blocks[:, :, 2:] = 0x80  # -128
    elif rows.type == "Q8_0":
        blocks[:, :, 2:] = 0x7F
    elif rows.type == "MXFP4" and not byte:
        blocks[:, :, 1:] = 0x77  # 6, as 0xFF is -6
    return BlockRows(rows.type, blocks.flatten(1))


def quantized_rows(x: Tensor, block: int) -> Tensor:
    """x [R, inputs] as the kernels quantise it: codes of 8 bits, and a scale for `block` adjacent inputs, of which the
    last ones may be fewer. float64."""

    def rounded(part: Tensor) -> Tensor:
        most = part.abs().amax(1, keepdim=True)
        return (part * (127 / most)).nan_to_num(0).round().double() * (most / 127).double()

    return torch.cat([rounded(part) for part in x.float().split(block, 1)], 1)
