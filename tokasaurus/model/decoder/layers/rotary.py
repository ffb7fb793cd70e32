"""Rotary position embedding in the half-rotation form of Hugging Face checkpoints."""

import math

import torch
from torch import Tensor

from tokasaurus.checkpoint import RopeInfo

# T tokens, H heads, D head size


def inverse_frequencies(rope: RopeInfo, head_dim: int) -> Tensor:
    """float32 [D / 2]: radians per position of each pair of channels. Source: arXiv 2104.09864.

    "llama3" scaling divides frequencies whose wavelength is long relative to the original context by `factor`, keeps
    the high ones, and interpolates between. Source: the Llama 3.1 model card.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling_type == "default":
        return frequencies
    num_turns = rope.original_context_length * frequencies / (2 * math.pi)
    blend = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)


class RotaryTable:
    """Cosines and sines of every position; looked up once per forward for all layers."""

    def __init__(self, rope: RopeInfo, head_dim: int, num_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)  # [num_positions, D]

    def at(self, positions: Tensor) -> Tensor:
        """positions [T] -> float32 [T, 1, D]: D / 2 cosines, then D / 2 sines."""
        return self._cos_sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, H, D], cos_sin [T, 1, D] -> [T, H, D]; computed in float32, to keep the angles precise."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
