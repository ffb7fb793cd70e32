"""Rotary position embedding in the half-rotation form of Hugging Face checkpoints."""

import math

import torch
from torch import Tensor

from tokasaurus.checkpoint import RopeInfo

# T tokens, H heads, D head size


def inverse_frequencies(rope: RopeInfo, head_dim: int) -> Tensor:
    """float32 [D / 2]: radians per position of each pair of channels. Source: arXiv 2104.09864.

    Each scaling divides frequencies by `factor`: "linear" all of them; "llama3" those whose wavelength is long relative
    to the original context, keeps the high ones, and interpolates between (source: the Llama 3.1 model card); "yarn"
    likewise, but interpolates by channel (source: arXiv 2309.00071).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling_type == "default":
        return frequencies
    if rope.scaling_type == "linear":
        return frequencies / rope.factor
    if rope.scaling_type == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
    else:
        num_turns = rope.original_context_length * frequencies / (2 * math.pi)
        kept = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_ramp(rope: RopeInfo, head_dim: int) -> Tensor:
    """float32 [D / 2]: 0 for pairs that turn more than beta_fast times in the original context, 1 for those that turn
    less than beta_slow times, and a straight line between."""

    def pair_that_turns(num_turns: float) -> float:
        """Index of the pair of channels, with a fraction."""
        wavelength = rope.original_context_length / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)


class RotaryTable:
    """Cosines and sines of every position; looked up once per forward for all layers."""

    def __init__(self, rope: RopeInfo, head_dim: int, num_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        self._cos_sin = cos_sin.to(device)  # [num_positions, D]

    def at(self, positions: Tensor) -> Tensor:
        """positions [T] -> float32 [T, 1, D]: D / 2 cosines, then D / 2 sines."""
        return self._cos_sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, H, D], cos_sin [T, 1, D] -> [T, H, D]; computed in float32, to keep the angles precise."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
