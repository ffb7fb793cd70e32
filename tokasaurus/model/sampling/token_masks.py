"""Apply a TokenMasks, which says which tokens may be drawn, to rows of logits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokasaurus.messages.forward import TokenMasks

# A rows with a mask, V vocabulary

_BITS = 32
"""Tokens per word of TokenMasks.bits."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS)


class MaskedRows(NamedTuple):
    """The A rows of a chunk of logits that have a mask. At least one token is allowed in each."""

    rows: Tensor
    """int64 [A], indices into the chunk's rows."""

    is_allowed: Tensor
    """bool [A, V]."""

    def forbid(self, logits: Tensor) -> None:
        """Set logits [rows, V] to -inf for the tokens that are not allowed."""
        logits[self.rows] = logits[self.rows].masked_fill_(~self.is_allowed, -torch.inf)

    def correct(self, tokens: Tensor) -> None:
        """Replace each drawn token that is not allowed by the first allowed one. tokens: int64 [rows].

        This happens if a bias of -inf forbids every allowed token: then all logits of the row are -inf.
        """
        drawn = tokens[self.rows].unsqueeze(1)
        first = self.is_allowed.int().argmax(dim=1, keepdim=True)
        tokens[self.rows] = torch.where(self.is_allowed.gather(1, drawn), drawn, first).squeeze(1)


def masked_rows(masks: TokenMasks, logits: Tensor, first_row: int) -> MaskedRows:
    """The rows with a mask among logits [rows, V], which are the rows of a step from `first_row` on."""
    num_rows, vocab_size = logits.shape
    own = slice(*np.searchsorted(masks.rows, (first_row, first_row + num_rows)).tolist())
    words = torch.from_numpy(masks.bits[own].view(np.int32)).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((words.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    rows = torch.from_numpy(masks.rows[own].astype(np.int64) - first_row).to(logits.device)
    return MaskedRows(rows, is_allowed)
