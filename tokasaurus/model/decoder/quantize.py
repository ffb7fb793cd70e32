"""Weights of a plain checkpoint, quantised while they are packed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.checkpoint.block_types import I4_GROUPS, I8, I8_INPUTS, pack_i4_rows, pack_i8_rows
from tokasaurus.model.cpu.layer_executor import BlockRows

_INT4 = "I4_64"
_PART_NUMBERS = 1 << 22
"""Weights that are quantised at a time: intermediate results take several times their memory."""
_TINY = torch.finfo(torch.float32).tiny
"""Scale of weights that are all zero."""


class CannotQuantize(Exception):
    """The message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What becomes of the weights of linear layers."""

    quantization: str | None = None
    """"int8" or "int4": plain weights become this; None: they stay plain."""
    is_int8: bool = False
    """The kernels multiply quantised weights by activations of 8 bits, in integers; else they widen the weights."""


def quantized(weight: Tensor, quantization: str) -> BlockRows:
    """weight [O, E] -> blocks, rounded to the nearest. quantization: as in Packing. Raises CannotQuantize.

    "int8": a scale for each output, the largest weight's magnitude / 127. "int4": a scale and a min for 64 adjacent
    inputs, which the least and the largest of them decide.
    """
    num_outputs, in_size = weight.shape
    block_type, unit, quantize = (I8, I8_INPUTS, _int8) if quantization == "int8" else (_INT4, I4_GROUPS[_INT4], _int4)
    if in_size % unit:
        raise CannotQuantize(f"a linear layer has {in_size} inputs, which is no multiple of {unit}")
    step = max(1, _PART_NUMBERS // in_size)
    parts = [quantize(weight[first : first + step].float()) for first in range(0, num_outputs, step)]
    return BlockRows(block_type, torch.cat(parts))


def _int8(rows: Tensor) -> Tensor:
    """float32 [R, E] -> uint8 [R, bytes of a row]."""
    scales = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=_TINY)
    codes = (rows / scales).round_().add_(128).to(torch.uint8)
    return torch.from_numpy(pack_i8_rows(scales.numpy(), codes.numpy()))


def _int4(rows: Tensor) -> Tensor:
    """float32 [R, E] -> uint8 [R, bytes of a row]."""
    groups = rows.view(len(rows), -1, I4_GROUPS[_INT4])
    mins, most = groups.amin(2), groups.amax(2)
    scales = ((most - mins) / 15).clamp(min=_TINY)
    codes = ((groups - mins[:, :, None]) / scales[:, :, None]).round_().to(torch.uint8)
    both = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    return torch.from_numpy(pack_i4_rows(scales.numpy(), mins.numpy(), both.numpy()))
