"""Prompts -> vectors: pools the hidden states of each prompt, however many steps compute it."""

import numpy as np
import torch
from torch import Tensor

from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.device_batch import DeviceBatch

# T tokens in this forward, R prompts that end in it, E hidden size, D numbers of a result

_TOKENS_AT_ONCE = 1024
"""Hidden states that are normed together where all tokens of a prompt count: bounds the memory of their float32."""


class Pooler:
    """Of one worker of the last stage. Where all tokens of a prompt count, a slot has their sum so far."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        assert model.pooling is not None
        self._model = model
        self._kind = model.pooling.kind
        size = num_slots if model.pooling.needs_all_tokens else 0
        self._sums = torch.zeros((size, model.hidden_size), dtype=torch.float32, device=model.device)
        self._num_seen = np.zeros(size, np.int64)
        """Tokens of each slot's prompt that steps have computed, from the first on; -1: some were not."""

    def pool(self, hidden: Tensor, batch: DeviceBatch) -> Tensor:
        """hidden [T, E], what the last layer gives for the batch's tokens, without padding -> float32 [R, D], on the
        device; NaN for a prompt of which a token is missing that counts."""
        if self._kind == "last":
            return self._model.scored(self._model.normed(hidden[batch.logit_rows[: batch.num_sampled]]))
        self._add(hidden, batch)
        ended = torch.from_numpy(batch.host_sampled_slots[: batch.num_sampled].astype(np.int64)).to(hidden.device)
        pooled = self._sums[ended]
        if self._kind == "mean":
            counts = self._num_seen[batch.host_sampled_slots[: batch.num_sampled]]
            pooled = pooled / torch.from_numpy(counts).to(pooled)[:, None]
        return self._model.scored(pooled)

    def _add(self, hidden: Tensor, batch: DeviceBatch) -> None:
        slots, positions = batch.token_slots, batch.token_positions
        firsts = np.flatnonzero(np.diff(slots, prepend=-1))  # of each row
        rows, counts = slots[firsts], np.diff(np.append(firsts, len(slots)))
        begins, follows = positions[firsts] == 0, self._num_seen[rows] == positions[firsts]
        self._num_seen[rows] = np.where(begins, 0, np.where(follows, self._num_seen[rows], -1)) + counts * follows
        self._num_seen[rows[begins]] = counts[begins]
        self._sums[_indices(rows[begins], hidden)] = 0
        self._sums[_indices(rows[~begins & ~follows], hidden)] = torch.nan
        counted = np.flatnonzero(positions == 0) if self._kind == "first" else np.arange(len(slots))
        for start in range(0, len(counted), _TOKENS_AT_ONCE):
            tokens = counted[start : start + _TOKENS_AT_ONCE]
            normed = self._model.normed(hidden[_indices(tokens, hidden)])
            self._sums.index_add_(0, _indices(slots[tokens], hidden), normed)


def _indices(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
