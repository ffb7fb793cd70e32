"""Apply a TokenMasks, which says which tokens may be drawn, to rows of logits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokasaurus.messages.forward import TokenMasks
from tokasaurus.model.sampling.chosen_rows import ChosenRows, choose_rows
from tokasaurus.model.staging.staging import Staging

# A rows with a mask, V vocabulary

_BITS = 32
"""Tokens per word of TokenMasks.bits."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS)


class DeviceMasks(NamedTuple):
    """A TokenMasks on the device."""

    rows: ChosenRows
    """The A rows with a mask."""

    bits: Tensor
    """int32 [A, words], the bits of TokenMasks."""

    def cut(self, first_row: int, num_rows: int) -> "DeviceMasks | None":
        """A copy of the masks of num_rows rows from `first_row` on; None if no such row has a mask."""
        own = self.rows.within(first_row, num_rows)
        if own.start == own.stop:
            return None
        return DeviceMasks(self.rows.cut(first_row, num_rows), self.bits[own].clone())


def stage_masks(masks: TokenMasks, staging: Staging) -> DeviceMasks:
    """The masks are on the device once `staging` has sent them."""
    assert len(masks.bits) == len(masks.rows), "one mask per row"
    return DeviceMasks(choose_rows(masks.rows, staging), staging.to_device(masks.bits.view(np.int32)))


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


def masked_rows(masks: DeviceMasks, logits: Tensor, first_row: int) -> MaskedRows | None:
    """The rows with a mask among logits [rows, V], which are the rows of a step from `first_row` on; None if there are
    none."""
    num_rows, num_logits = logits.shape
    own = masks.rows.within(first_row, num_rows)
    if own.start == own.stop:
        return None
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((masks.bits[own].unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :num_logits]
    return MaskedRows(masks.rows.on_device[own] - first_row, is_allowed)
