"""Which tokens may be drawn: what a TokenMasks does to rows of logits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokasaurus.messages.forward import TokenMasks

# A rows with a mask, V vocabulary

_BITS = 32
"""Tokens of a word of TokenMasks.bits."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS)


class MaskedRows(NamedTuple):
    """rows: int64 [A], of the logits at hand. is_allowed: bool [A, V]."""

    rows: Tensor
    is_allowed: Tensor

    def forbid(self, logits: Tensor) -> None:
        """-inf for the tokens outside; logits [rows, V]."""
        logits[self.rows] = logits[self.rows].masked_fill_(~self.is_allowed, -torch.inf)

    def correct(self, tokens: Tensor) -> None:
        """Where all that may be drawn is as unlikely as what may not, by a bias of -inf, it is drawn nonetheless: the
        first of it. tokens: int64 [rows], drawn."""
        drawn = tokens[self.rows].unsqueeze(1)
        first = self.is_allowed.int().argmax(dim=1, keepdim=True)
        tokens[self.rows] = torch.where(self.is_allowed.gather(1, drawn), drawn, first).squeeze(1)


def masked_rows(masks: TokenMasks, logits: Tensor, first_row: int) -> MaskedRows:
    """Of logits [rows, V], the rows of a step from `first_row` on, those with a mask."""
    num_rows, vocab_size = logits.shape
    own = slice(*np.searchsorted(masks.rows, (first_row, first_row + num_rows)).tolist())
    words = torch.from_numpy(masks.bits[own].view(np.int32)).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((words.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    rows = torch.from_numpy(masks.rows[own].astype(np.int64) - first_row).to(logits.device)
    return MaskedRows(rows, is_allowed)
