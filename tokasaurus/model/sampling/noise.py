"""Noise for sampling as a pure function of (seed, sample index, position, token id).

A token is drawn as argmax(logit / temperature + Gumbel noise), which is a draw from the softmax (the Gumbel-max trick).
With the noise hashed rather than drawn from a generator, a sequence's text depends on nothing else in the batch, and a
rounding difference in one logit hardly ever changes the winner.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# R rows that sample, V vocabulary

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every input bit moves every output bit. Source: the splitmix64 finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("NDArray[np.uint64]", x ^ (x >> np.uint64(31)))


def sequence_keys(seeds: NDArray[np.uint64], sample_indices: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """seeds uint64 [O], sample_indices uint32 [O] -> uint64 [O]."""
    return _mix64(_mix64(seeds + _GOLDEN) + (sample_indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint32]:
    """keys uint64 [R] of sequences, positions int32 [R] of the tokens to draw -> uint32 [R, 2]."""
    mixed = _mix64(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    low = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.stack((low, (mixed >> np.uint64(32)).astype(np.uint32)), axis=-1)


def _mix32(x: Tensor) -> Tensor:
    """The same for 32 bits, held in int64. Source: the murmur3 finaliser."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """keys int64 [R, 2], from position_keys -> float32 [R, V], standard Gumbel.

    The uniform is (hash + 0.5) / 2^32 and is taken as the small side of the logarithm, where float32 is fine-grained:
    the largest noise is 22.9 and tokens of probability 1e-9 are still drawn as often as they should be. It stays below
    1, whose noise of -inf would let a token that top-p excludes win over the only one that it leaves.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    first = _mix32((token_ids * 0x9E3779B1 + keys[:, :1]) & 0xFFFFFFFF)
    hashed = _mix32(first ^ keys[:, 1:])
    uniform = (hashed.double() + 0.5).mul_(2.0**-32).float().clamp_(max=_LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))
