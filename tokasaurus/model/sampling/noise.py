"""Noise for sampling as a pure function of (seed, sample index, position, token id).

A token is drawn as argmax(logit / temperature + Gumbel noise), which is a draw from the softmax (the Gumbel-max trick).
Because the noise is a hash and not drawn from a generator, a sequence's text does not depend on the rest of the batch,
and a rounding difference in one logit hardly ever changes the sampled token.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# R rows that sample, O slots that are opened, V vocabulary

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_FACTOR = 0x9E3779B1
_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on 64 bits in which every input bit affects every output bit. Source: the splitmix64 finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("NDArray[np.uint64]", x ^ (x >> np.uint64(31)))


def sequence_keys(seeds: NDArray[np.uint64], sample_indices: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """seeds uint64 [O], sample_indices uint32 [O] -> uint64 [O], one key per sequence."""
    return _mix64(_mix64(seeds + _GOLDEN) + (sample_indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint32]:
    """keys uint64 [R], from sequence_keys; positions int32 [R] of the tokens to draw -> uint32 [R, 2]."""
    mixed = _mix64(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    low = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.stack((low, (mixed >> np.uint64(32)).astype(np.uint32)), axis=-1)


def _mix32(x: Tensor) -> Tensor:
    """Like _mix64, for 32 bits stored in int64. Source: the murmur3 finaliser."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """keys int64 [R, 2], from position_keys -> float32 [R, V], standard Gumbel.

    The noise is -log(-log1p(-u)) with u = (hash + 0.5) / 2^32, so that large noise comes from small u, where
    float32 has fine steps: the largest noise is 22.9, and tokens of probability 1e-9 are still drawn at the right rate.
    u stays below 1: there the noise would be -inf, and a token that top-p excludes could win over the only remaining
    token.
    """
    return gumbel_noise_of(keys, torch.arange(vocab_size, dtype=torch.int64, device=keys.device))


def gumbel_noise_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The values of gumbel_noise for these tokens alone. token_ids: int64 [N], or [R, N] -> float32 [R, N]."""
    first = _mix32((token_ids * _TOKEN_FACTOR + keys[:, :1]) & 0xFFFFFFFF)
    hashed = _mix32(first ^ keys[:, 1:])
    uniform = (hashed.double() + 0.5).mul_(2.0**-32).float().clamp_(max=_LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def keys_of_shard(keys: Tensor, first_id: int) -> Tensor:
    """keys int64 [R, 2], from position_keys -> keys with which token id 0 has the noise that token id first_id has with
    the given ones, and so on for the ids after it."""
    shifted = keys.clone()
    shifted[:, 0] = (keys[:, 0] + first_id * _TOKEN_FACTOR) & 0xFFFFFFFF
    return shifted
