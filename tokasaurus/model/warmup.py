"""The largest forwards, run at start-up: if they fit, every later one does. They compile what is compiled, too."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import ForwardInput, ScoredRows, TokenMasks
from tokasaurus.messages.slots import LogitRules, SlotChanges, SlotOpens
from tokasaurus.model.runner import ModelRunner
from tokasaurus.model.scoring import SCORED_AT_ONCE
from tokasaurus.model.token_masks import num_mask_words

_NUM_LIMITED_ROWS = 64
"""Sampling goes through rows in chunks, so a chunk is enough; limits are slow on flat logits of a made-up prompt."""

_NUM_TOP = 20
"""Likeliest tokens of each that is scored: a few bytes, however many they are."""

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """max_tokens, max_seqs: of one forward. context_length: tokens of the longest sequence. vocab_size: the model's."""

    max_tokens: int
    max_seqs: int
    context_length: int
    vocab_size: int


def widest_prefill(limits: ForwardLimits) -> ForwardInput:
    """As many tokens and as many sampling rows as a forward may have, and as many scored as are at once."""
    num_rows = min(limits.max_seqs, limits.max_tokens)
    shares = np.full(num_rows, limits.max_tokens // num_rows, np.int32)
    shares[: limits.max_tokens % num_rows] += 1
    num_tokens = np.minimum(shares, limits.context_length)
    step = _first_step(num_tokens, np.zeros(num_rows, np.int32), limits)
    counts = np.diff(np.minimum(np.cumsum(num_tokens - 1), SCORED_AT_ONCE), prepend=0).astype(np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    num_top = min(_NUM_TOP, limits.vocab_size)
    return replace(step, scored=ScoredRows(rows, counts, np.zeros(int(counts.sum()), np.int32), num_top))


def longest_prefill(limits: ForwardLimits) -> ForwardInput:
    """The end of a sequence that fills the context, in one chunk."""
    chunk = min(limits.max_tokens, limits.context_length)
    return _first_step(np.array([chunk], np.int32), np.array([limits.context_length - chunk], np.int32), limits)


def longest_last_tokens(limits: ForwardLimits) -> ForwardInput:
    """As many rows as a forward may have, each the last token of a sequence that fills the context."""
    num_rows = min(limits.max_seqs, limits.max_tokens)
    return _first_step(np.ones(num_rows, np.int32), np.full(num_rows, limits.context_length - 1, np.int32), limits)


def decode_after(step: ForwardInput) -> ForwardInput:
    """The same slots once more, decoding a token each."""
    changes = SlotChanges(closed=_NOTHING, opened=None, block_slots=_NOTHING, block_ids=_NOTHING)
    return ForwardInput(0, step.slots, np.ones_like(step.num_tokens), len(step.slots), _NOTHING, changes)


def single_token(limits: ForwardLimits) -> ForwardInput:
    """The smallest forward."""
    return _first_step(np.ones(1, np.int32), np.zeros(1, np.int32), limits)


def warm_up(runner: ModelRunner, limits: ForwardLimits, is_context_costly: bool) -> None:
    """Run the widest prefill and a decode after it; the longest ones, where attention's memory grows with the context;
    and the smallest forward, lest a size of 1 be special to a compiler. Waits for them.

    The slots stay open at the worker, which does no harm: the manager opens a slot before it uses it.
    """
    widest = widest_prefill(limits)
    steps = [widest]
    if limits.context_length > int(widest.num_tokens.max()):
        steps.append(decode_after(widest))
    if is_context_costly:
        steps += [longest_prefill(limits), longest_last_tokens(limits)]
    for step in (*steps, single_token(limits)):
        runner.run(step).host_token_ids()


def _first_step(
    num_tokens: NDArray[np.int32], first_positions: NDArray[np.int32], limits: ForwardLimits
) -> ForwardInput:
    """Opens a slot for each row, which ends its prompt. No slot owns a block: all keys and values go to the padding
    block. The first row is greedy, the others have every sampling feature on."""
    num_rows = len(num_tokens)
    slots = np.arange(1, num_rows + 1, dtype=np.int32)
    ruled = slots[:_NUM_LIMITED_ROWS]
    rules = LogitRules(
        slots=ruled,
        num_request_tokens=np.zeros(len(ruled), np.int32),
        presence=np.full(len(ruled), 0.5, np.float32),
        frequency=np.full(len(ruled), 0.5, np.float32),
        repetition=np.full(len(ruled), 1.5, np.float32),
        bias_counts=np.ones(len(ruled), np.int32),
        bias_ids=np.zeros(len(ruled), np.int32),
        bias_values=np.full(len(ruled), -1.0, np.float32),
        bias_ends=np.full(len(ruled), np.iinfo(np.int32).max, np.int32),
    )
    opened = SlotOpens(
        slots=slots,
        num_prompt_tokens=first_positions + num_tokens,
        first_positions=first_positions,
        temperatures=np.minimum(np.arange(num_rows), 1).astype(np.float32),
        top_ps=np.where(np.arange(num_rows) < _NUM_LIMITED_ROWS, 0.9, 1.0).astype(np.float32),
        top_ks=np.where(np.arange(num_rows) < _NUM_LIMITED_ROWS, 2000, 0).astype(np.int32),
        min_ps=np.where(np.arange(num_rows) < _NUM_LIMITED_ROWS, 0.01, 0.0).astype(np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
        sample_indices=np.zeros(num_rows, np.uint32),
        want_logprobs=np.ones(num_rows, np.bool_),
        rules=rules,
    )
    changes = SlotChanges(closed=_NOTHING, opened=opened, block_slots=_NOTHING, block_ids=_NOTHING)
    prompt_ids = np.zeros(int(num_tokens.sum()), np.int32)
    # Of the whole vocabulary, its bits behind the end included.
    bits = np.full((len(ruled), num_mask_words(limits.vocab_size)), np.iinfo(np.uint32).max, np.uint32)
    masks = TokenMasks(ruled - np.int32(1), bits)
    return ForwardInput(0, slots, num_tokens, 0, prompt_ids, changes, masks=masks)
