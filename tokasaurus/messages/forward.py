"""What the manager sends to the model workers for each step, and what they answer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.slots import SlotChanges

FORWARD_PHASES = ("products", "heads", "prefix_attention", "attention", "sampling")
"""Parts of a forward whose time is counted: matrix products with norms, gates and sums; rotary and the writing of keys
and values; shared prefixes; all other attention; sampling and scoring."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """G groups of decode rows that share a prefix: attention over it is computed once for all rows of a group.

    The first sum(sizes) decode rows, group after group. sizes: int32 [G], rows. num_blocks: int32 [G], whole blocks
    with which the block table of every row of the group begins; each row has at least one token behind them.
    """

    sizes: NDArray[np.int32]
    num_blocks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Prefill rows of which the log-probabilities of the prompt's tokens are wanted, A of the S rows.

    rows: int32 [A], ascending. counts: int32 [A], each row's first so many tokens of this step, whose successors are
    scored: all of them, but for the last token of a prompt. target_ids: int32 [Q], these successors, row after row; Q =
    sum(counts). num_top: of the likeliest tokens, at each.
    """

    rows: NDArray[np.int32]
    counts: NDArray[np.int32]
    target_ids: NDArray[np.int32]
    num_top: int


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that A of the R rows that sample may draw: their log-probabilities are unchanged.

    rows: int32 [A], which of the R, ascending. bits: uint32 [A, ceil(vocabulary / 32)], bit t % 32 of word t // 32 is
    set where token t may be drawn; in each row one is, at least.
    """

    rows: NDArray[np.int32]
    bits: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step. Every rank of a replica receives the same.

    S rows of the batch, one per running slot: first the `num_decode` rows that decode (one token each, the last that
    the worker sampled for the slot), then the rows that prefill.

    slots: int32 [S]. num_tokens: int32 [S], tokens of each row in this step.
    prompt_ids: int32 [P], the prefill rows' tokens one after the other; P = sum(num_tokens[num_decode:]).

    groups: None where no rows share a prefix that is worth it. scored, masks: None where no row is, or has one.

    A row samples a token if it decodes, or if its chunk ends at the slot's num_prompt_tokens.

    A row may read blocks that an earlier row of the same step fills: in every layer the keys and values of all rows are
    written before any row attends. So the samples of a prompt can start in the step that computes it.
    """

    step_id: int
    slots: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_decode: int
    prompt_ids: NDArray[np.int32]
    changes: SlotChanges
    groups: PrefixGroups | None = None
    scored: ScoredRows | None = None
    masks: TokenMasks | None = None


@dataclass(frozen=True, slots=True)
class EndOfInputs:
    """No step follows: the worker exits. Answers that nobody reads any more may be lost."""


@dataclass(frozen=True, slots=True)
class TopOfRows:
    """The K likeliest tokens of A of the rows that sampled: those that asked; K is the most that one of them asked for.

    rows: int64 [A], which of the R, ascending. token_ids: int32 [A, K], the likeliest first. logprobs: float32 [A, K].
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the Q tokens of ScoredRows.target_ids, each at its place.

    logprobs: float32 [Q]. ranks: int32 [Q], 1 + the number of tokens that are likelier. top_ids: int32 [Q, K], the K =
    num_top likeliest tokens, falling. top_logprobs: float32 [Q, K]; a token's value is the same float in both.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The R tokens sampled in one step, in the order of the rows that sampled.

    token_ids: int32 [R]. logprobs: float32 [R], NaN where not asked; None where no row of the step asked.
    top: None where no row asked for likeliest tokens. scores: None where no row was scored.
    forward_seconds: how long the worker was busy with this step.
    num_recompiles: compilations that it waited for in this step; warm-up is to leave none.
    phase_seconds: of each of FORWARD_PHASES since the worker's start-up, where it counts them, else empty.
    """

    step_id: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    forward_seconds: float
    num_recompiles: int = 0
    phase_seconds: tuple[float, ...] = ()
    top: TopOfRows | None = None
    scores: TokenScores | None = None
