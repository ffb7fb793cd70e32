"""Batch slots: changes to the worker's per-sequence state since the last step.

A slot is the worker's state of one sequence: block table, last token, position, sampling state. Slot 0 and block 0 are
padding; no sequence uses them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes to the logits before sampling, for A of the opened slots, with B biases in all.

    Every slot with a penalty is one of the A. Biases apply before penalties. Log-probabilities are
    computed from the unchanged logits.
    """

    slots: NDArray[np.int32]
    """int32 [A]."""
    num_request_tokens: NDArray[np.int32]
    """int32 [A], length of the request's own prompt. Later tokens were generated, even if they are prefilled again."""
    bias_counts: NDArray[np.int32]
    """int32 [A], number of biases of each slot."""
    bias_ids: NDArray[np.int32]
    """int32 [B], token ids, one slot after another."""
    bias_values: NDArray[np.float32]
    """float32 [B], added to the logit; -inf forbids the token."""
    bias_ends: NDArray[np.int32]
    """int32 [B], the bias applies while the sequence, including its prompt, has fewer tokens than this."""


@dataclass(frozen=True, slots=True)
class SlotOpens:
    """O slots assigned to sequences."""

    slots: NDArray[np.int32]
    """int32 [O]."""
    num_prompt_tokens: NDArray[np.int32]
    """int32 [O], tokens before the first sampled one, including cached tokens."""
    first_positions: NDArray[np.int32]
    """int32 [O], first position to prefill: the number of tokens whose KV was computed by earlier steps or earlier rows
    of the same step. Their blocks are appended to the slot's block table like all others."""
    sampling: NDArray[np.void]
    """SAMPLING_DTYPE [O], the sequences' SamplingParams."""
    seeds: NDArray[np.uint64]
    """uint64 [O]."""
    sample_indices: NDArray[np.uint32]
    """uint32 [O], index among the request's n samples."""
    want_logprobs: NDArray[np.bool_]
    """bool [O]."""
    rules: LogitRules | None = None
    """None if no opened slot has logit rules, as in most steps."""
    num_top_logprobs: NDArray[np.int32] | None = None
    """int32 [O], top-k logprobs wanted; None if no opened slot wants any."""
    first_writes: NDArray[np.int32] | None = None
    """int32 [O], first position whose KV is written. Earlier positions already have KV and are computed again only for
    their logits. None if equal to first_positions for all."""


@dataclass(frozen=True, slots=True)
class TableCopies:
    """C copies between block tables: the first num_blocks[i] blocks of source_slots[i] become the first of slots[i].

    All arrays are int32 [C]. The blocks of a long shared prompt are thus sent only once.
    """

    slots: NDArray[np.int32]
    source_slots: NDArray[np.int32]
    num_blocks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Changes applied before the forward, in this order: close, open, append blocks, copy tables.

    A block table has at least the blocks that the current step needs: an opened slot gets the blocks of its whole
    prompt, however many steps prefill it. Several slots may share a block; only one of them writes it.
    """

    closed: NDArray[np.int32]
    """int32 [C], slots whose sequence has left; the same message may open them again."""
    opened: SlotOpens | None
    """None if no slot is opened, as in most steps."""
    block_slots: NDArray[np.int32]
    """int32 [B], the slot whose block table gets block_ids[i]."""
    block_ids: NDArray[np.int32]
    """int32 [B], blocks to append."""
    copies: TableCopies | None = None
    """Copies into slots opened by this message, applied in order, since one may copy from another. Blocks appended to
    these slots come after the copied ones. None if nothing is copied."""
