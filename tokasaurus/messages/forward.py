"""Messages between the manager and the model workers: one input and one output per step.

A slot is the worker's state of one sequence: block table, last token, position, sampling state. Slot 0 and block 0 are
padding; no sequence uses them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORWARD_PHASES = ("gemm", "heads", "prefix_attention", "attention", "sampling")
"""Timed parts of a forward. gemm: gemms with norms, gates and residual sums. heads: rotary and writing keys and
values to the cache. prefix_attention: attention over shared prefixes. attention: all other attention. sampling:
sampling and prompt logprobs."""


RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]
"""The experts that routers chose for tokens, [tokens, layers, K]; of layers without experts, zeros. uint8 if there are
at most 256 experts."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """G prefix groups: attention over a group's shared prefix is computed once for all its rows.

    The groups are the first sum(sizes) decode rows, one group after another.
    """

    sizes: NDArray[np.int32]
    """int32 [G], rows per group."""
    num_blocks: NDArray[np.int32]
    """int32 [G], shared whole blocks at the start of each row's block table; every row has at least one more token."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsInput:
    """Prefill rows whose prompt logprobs are wanted: A of the S rows."""

    rows: NDArray[np.int32]
    """int32 [A], indices into the S rows, ascending."""
    counts: NDArray[np.int32]
    """int32 [A], tokens of each row in this step whose next token gets a logprob: all, except a prompt's last token."""
    target_ids: NDArray[np.int32]
    """int32 [Q], these next tokens, one row after another; Q = sum(counts)."""
    num_top: int
    """Top-k logprobs returned at each of the Q positions."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that A of the R sampling rows are allowed to sample. Logprobs are those without the mask, except in slots
    with `SlotOpens.logprobs_as_sampled`."""

    rows: NDArray[np.int32]
    """int32 [A], indices into the R sampling rows, ascending."""
    bits: NDArray[np.uint32]
    """uint32 [A, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t is allowed; at least one is."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes to the logits before sampling, for A of the opened slots, with B biases in all.

    Every slot with a penalty is one of the A. Biases apply before penalties. Log-probabilities are
    computed from the unchanged logits, except in slots with `SlotOpens.logprobs_as_sampled`.
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
    logprobs_as_sampled: NDArray[np.bool_] | None = None
    """bool [O], whether the slot's logprobs are of the distribution that its tokens are drawn from, instead of the
    model's own; None if this holds for no opened slot."""
    want_experts: NDArray[np.bool_] | None = None
    """bool [O], whether ForwardOutput.experts has the slot's tokens; None if for no opened slot."""
    first_writes: NDArray[np.int32] | None = None
    """int32 [O], first position whose KV is written. Earlier positions already have KV and are computed again only for
    their logits. None if equal to first_positions for all."""
    adapters: NDArray[np.int32] | None = None
    """int32 [O], number of the slot's adapter, 0 for none; None if no opened slot has one."""
    snapshots: NDArray[np.int32] | None = None
    """int32 [O], the snapshot in which states are those after the token before the first position, from 1 on; 0: states
    are zeros. None if all are."""


@dataclass(frozen=True, slots=True)
class TableCopies:
    """C copies between block tables: the first num_blocks[i] blocks of source_slots[i] become the first of slots[i].

    All arrays are int32 [C]. The blocks of a long shared prompt are thus sent only once.
    """

    slots: NDArray[np.int32]
    source_slots: NDArray[np.int32]
    num_blocks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """Where layers with windows keep the keys and values of tokens, for M blocks of tokens: see WindowGroups."""

    blocks: NDArray[np.int32]
    """int32 [M], as in block tables."""
    own: NDArray[np.int32]
    """int32 [M, groups], the block of each group."""


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Changes applied before the forward, in this order: place adapters, close, open, append blocks, copy tables.

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
    adapters: tuple[tuple[int, str], ...] = ()
    """Numbers of adapters, and the digest of the loaded one that each is from now on. No slot has had it before since
    the number was another's."""
    windows: WindowBlocks | None = None
    """Blocks whose tokens layers with windows keep from now on; None if there are none."""


@dataclass(frozen=True, slots=True)
class StateSaves:
    """A snapshots that a step keeps of the states of its prefill rows, for prompts that begin with the same tokens.

    The snapshots that slots opened by the same message start from are read, not written, by that step.
    """

    rows: NDArray[np.int32]
    """int32 [A], indices into the S rows, ascending; a row may have several."""
    num_tokens: NDArray[np.int32]
    """int32 [A], the row's tokens in this step that are before the snapshot: from 1 to all, ascending in a row."""
    snapshots: NDArray[np.int32]
    """int32 [A], their numbers, from 1 on."""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step. Every rank of a replica receives the same message.

    The batch has S rows, one per running slot: first `num_decode` decode rows (one token each: the last token the
    worker sampled for the slot), then the prefill rows.

    A row samples a token if it decodes, or if its prefill ends at the slot's num_prompt_tokens in this step.

    A row may read blocks that an earlier row of the same step fills: every layer writes the keys and values of all rows
    before any row attends. So the samples of a prompt can start in the step that computes the prompt.
    """

    step_id: int
    slots: NDArray[np.int32]
    """int32 [S]."""
    num_tokens: NDArray[np.int32]
    """int32 [S], tokens of each row in this step."""
    num_decode: int
    prompt_ids: NDArray[np.int32]
    """int32 [P], tokens of the prefill rows, one row after another; P = sum(num_tokens[num_decode:])."""
    changes: SlotChanges
    groups: PrefixGroups | None = None
    """None if no rows share a prefix long enough to repay a group."""
    prompt_logprobs: PromptLogprobsInput | None = None
    """None if no row needs prompt logprobs."""
    masks: TokenMasks | None = None
    """None if no row has a mask."""
    microbatch: int = 0
    """The microbatch of all its rows: see manager/engine/microbatches."""
    saves: StateSaves | None = None
    """None if no snapshot is kept."""

    def __reduce__(self) -> tuple[Any, ...]:
        changes = self.changes
        arrays = self.slots, self.num_tokens, self.prompt_ids, changes.closed, changes.block_slots, changes.block_ids
        parts = changes.opened, changes.copies, changes.adapters, changes.windows
        rest = self.groups, self.prompt_logprobs, self.masks, self.microbatch, self.saves
        return _forward_input, (self.step_id, self.num_decode, *map(_int32_bytes, arrays), *parts, *rest)


@dataclass(frozen=True, slots=True)
class TopOfRows:
    """Top-k logprobs of the A sampling rows that want them. K is the largest number that any of these rows wants."""

    rows: NDArray[np.int64]
    """int64 [A], indices into the R sampling rows, ascending."""
    token_ids: NDArray[np.int32]
    """int32 [A, K], most likely first."""
    logprobs: NDArray[np.float32]
    """float32 [A, K]; -inf for tokens that are impossible, where fewer than K are possible."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsOutput:
    """Prompt logprobs of the Q tokens in PromptLogprobsInput.target_ids, in the same order."""

    logprobs: NDArray[np.float32]
    """float32 [Q]."""
    ranks: NDArray[np.int32]
    """int32 [Q], 1 + the number of more likely tokens."""
    top_ids: NDArray[np.int32]
    """int32 [Q, K], the K = num_top most likely tokens, most likely first."""
    top_logprobs: NDArray[np.float32]
    """float32 [Q, K]; for a token that is also in target_ids, the same float as in `logprobs`."""


@dataclass(frozen=True, slots=True)
class NonfiniteTokens:
    """The first token of each of A slots for which a step computed a hidden state or logits with NaN or infinity, or a
    wanted logprob of its sampled token that is not finite."""

    positions: NDArray[np.int32]
    """int32 [A]."""
    blocks: NDArray[np.int32]
    """int32 [A], the block of each position. The KV cache has zeros for such tokens."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The R tokens sampled in one step, in the order of the sampling rows."""

    step_id: int
    token_ids: NDArray[np.int32]
    """int32 [R]."""
    logprobs: NDArray[np.float32] | None
    """float32 [R], NaN for rows that do not want logprobs; None if no row of the step wants them."""
    forward_seconds: float
    """Time the worker was busy with this step, in seconds."""
    num_recompiles: int = 0
    """Compilations that this step waited for; 0 unless warm-up missed a shape."""
    phase_seconds: tuple[float, ...] = ()
    """Seconds in each of FORWARD_PHASES since the worker started; empty if the worker does not count them."""
    top: TopOfRows | None = None
    """None if no row wants top-k logprobs."""
    prompt_logprobs: PromptLogprobsOutput | None = None
    """Prompt logprobs; None if no row needs them."""
    nonfinite: NonfiniteTokens | None = None
    """None if every number is finite. The sampled tokens of these slots have no meaning."""
    missed_graphs: bool = False
    """Whether this decode step was larger than all CUDA graphs that are recorded."""
    idle_seconds: float = 0.0
    """Time from the end of the step before this one until this one began, on the device's clock; 0 for the first."""
    experts: RoutedExperts | None = None
    """[A, layers, K], of the step's A tokens in slots that want experts, in order; None if there are none."""
    expert_tokens: NDArray[np.int64] | None = None
    """[layers, experts], tokens of each since the worker started; None if it does not count them."""
    vectors: NDArray[np.float32] | None = None
    """float32 [R, D], in place of sampled tokens: each prompt's pooled hidden state or scores; None from a model that
    generates."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.logprobs, self.forward_seconds, self.num_recompiles, self.phase_seconds, self.top)
        rest = (self.prompt_logprobs, self.nonfinite, self.missed_graphs, self.idle_seconds, self.experts)
        last = self.expert_tokens, self.vectors
        return _forward_output, (self.step_id, _int32_bytes(self.token_ids), *parts, *rest, *last)


# For a small step, pickle takes most of the time on arrays (some 5 microseconds to write one, 3 to read it) and on the
# fields of dataclasses. As bytes and positional arguments, a step of one row takes half as long, its result a quarter.


def _int32_bytes(array: NDArray[np.int32]) -> bytearray | None:
    return bytearray(array.astype(np.int32, copy=False)) if len(array) else None


def _int32_array(content: bytearray | None) -> NDArray[np.int32]:
    return _NOTHING if content is None else np.frombuffer(content, np.int32)


_NOTHING = np.zeros(0, np.int32)


def _forward_input(
    step_id: int,
    num_decode: int,
    slots: bytearray | None,
    num_tokens: bytearray | None,
    prompt_ids: bytearray | None,
    closed: bytearray | None,
    block_slots: bytearray | None,
    block_ids: bytearray | None,
    opened: SlotOpens | None,
    copies: TableCopies | None,
    adapters: tuple[tuple[int, str], ...],
    windows: WindowBlocks | None,
    *rest: Any,
) -> ForwardInput:
    blocks = _int32_array(block_slots), _int32_array(block_ids)
    changes = SlotChanges(_int32_array(closed), opened, *blocks, copies, adapters, windows)
    rows = _int32_array(slots), _int32_array(num_tokens)
    return ForwardInput(step_id, *rows, num_decode, _int32_array(prompt_ids), changes, *rest)


def _forward_output(step_id: int, token_ids: bytearray | None, *rest: Any) -> ForwardOutput:
    return ForwardOutput(step_id, _int32_array(token_ids), *rest)
