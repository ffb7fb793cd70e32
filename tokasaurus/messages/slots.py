"""Batch slots: what changed at the worker's per-sequence state since the last step.

A slot is the worker's memory of one sequence: block table, last token, position, sampling state. Slot 0 and block 0
are for padding and never given to a sequence.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogitRules:
    """How the logits of some slots change before a token is drawn, A of those that are opened: first by biases, then by
    penalties, in the way and order of vLLM. Log-probabilities are of the unchanged logits.

    slots: int32 [A]. num_request_tokens: int32 [A], of the request's own prompt; all behind them was generated, though
    it may be prefilled again.
    presence, frequency: float32 [A], subtracted for each token generated so far: once, and as often as it was.
    repetition: float32 [A], logits of tokens in the prompt or generated are divided by it, negative ones multiplied.
    bias_counts: int32 [A], how many of the biases are for each. bias_ids: int32 [B], tokens. bias_values: float32 [B],
    added; -inf forbids. bias_ends: int32 [B], a bias acts while the sequence, its prompt included, has fewer tokens.
    """

    slots: NDArray[np.int32]
    num_request_tokens: NDArray[np.int32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    bias_counts: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    bias_ends: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotOpens:
    """Slots given to sequences, O of them, as arrays of one length.

    slots: int32 [O]. num_prompt_tokens: int32 [O], tokens to prefill before the first is sampled, cached ones included.
    first_positions: int32 [O], where prefill starts: the number of tokens whose KV earlier steps, or earlier rows of
    the same step, have computed. The slot's table gets their blocks like all others.
    temperatures, top_ps, min_ps: float32 [O]. top_ks: int32 [O], 0 for no limit. See SamplingParams.
    seeds: uint64 [O]. sample_indices: uint32 [O], which of the n samples it is.
    want_logprobs: bool [O]. num_top_logprobs: int32 [O], how many of the likeliest tokens are wanted with theirs; None
    where no slot wants any.
    rules: None where the logits of none of them change, which is most steps.
    first_writes: int32 [O], tokens at positions before it have their KV already, and are computed again for their
    logits alone: nothing is written. None where that is first_positions for all.
    """

    slots: NDArray[np.int32]
    num_prompt_tokens: NDArray[np.int32]
    first_positions: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    top_ps: NDArray[np.float32]
    top_ks: NDArray[np.int32]
    min_ps: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    sample_indices: NDArray[np.uint32]
    want_logprobs: NDArray[np.bool_]
    rules: LogitRules | None = None
    num_top_logprobs: NDArray[np.int32] | None = None
    first_writes: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class TableCopies:
    """Block tables that begin as another's, C of them: those of slots[i] and source_slots[i] have the same first
    num_blocks[i] blocks. All int32 [C]. A slot's long prompt is thereby sent once for all that share it.
    """

    slots: NDArray[np.int32]
    source_slots: NDArray[np.int32]
    num_blocks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Applied before the forward, in this order: close, open, append blocks, copy tables.

    closed: int32 [C], slots whose sequence is gone; one of them may be opened again by the same message.
    opened: None where no slot is opened, which is most steps.
    block_slots, block_ids: int32 [B], block `block_ids[i]` is appended to the block table of slot `block_slots[i]`.
    A table has the blocks that the step at hand needs, and may have more: a slot that opens gets those of its whole
    prompt, however many steps compute it. Several slots may have one block, which only one of them fills.
    copies: for slots opened by this message, in the order in which to copy, for one may copy from another; blocks that
    are appended to them come behind what is copied. None where nothing is.
    """

    closed: NDArray[np.int32]
    opened: SlotOpens | None
    block_slots: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    copies: TableCopies | None = None
