"""Forwards that are run at start-up.

The largest ones: if they fit, every later one does. They compile what is compiled, too. Or, where the memory of the
largest is known and reserved (forward_memory.py), a small one of each kind: no first request waits for what is loaded
late.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import ForwardInput, PrefixGroups, ScoredRows, TokenMasks
from tokasaurus.messages.slots import LogitRules, SlotChanges, SlotOpens
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.sampling.prompt_logprobs import SCORED_AT_ONCE
from tokasaurus.model.sampling.token_masks import num_mask_words

_NUM_LIMITED_ROWS = 64
"""Sampling goes through rows in chunks, so a chunk is enough; limits are slow on flat logits of a made-up prompt."""

_NUM_TOP = 20
"""Top-k logprobs of each sampled and of each scored token: a few bytes, however many they are."""

_SMALL_ROWS = 4
_SMALL_TOKENS = 2
"""Rows of the small forwards, and prompt tokens of each."""

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
    return _scored(step, limits)


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


def small_forwards(limits: ForwardLimits, page_size: int) -> Iterator[ForwardInput]:
    """One of each kind, each to be run before the next: prefill with prompt logprobs and decode, both with every
    sampling feature; then, with none, prefill, decode beside prefill, decode in a group that shares a prefix, and one
    token."""
    num_rows = min(_SMALL_ROWS, limits.max_seqs, limits.max_tokens)
    num_tokens = np.full(num_rows, min(_SMALL_TOKENS, limits.max_tokens // num_rows, limits.context_length), np.int32)
    start = np.zeros(num_rows, np.int32)
    prefill = _first_step(num_tokens, start, limits)
    yield _scored(prefill, limits)
    if limits.context_length > num_tokens[0]:
        yield replace(decode_after(prefill), masks=prefill.masks)
        plain = _first_step(num_tokens, start, limits, is_plain=True)
        yield plain
        yield _decode_beside_prefill(plain, limits)
    if limits.context_length > page_size + 1:
        behind_block = _first_step(np.ones_like(start), np.full_like(start, page_size), limits, is_plain=True)
        yield behind_block
        groups = PrefixGroups(np.array([num_rows], np.int32), np.ones(1, np.int32))
        yield replace(decode_after(behind_block), groups=groups)
    yield _first_step(np.ones(1, np.int32), np.zeros(1, np.int32), limits, is_plain=True)


def warm_up_small(runner: ModelRunner, limits: ForwardLimits, page_size: int) -> None:
    """Run the small forwards, and read their results as the worker's loop does. Like `warm_up`, leaves slots open."""
    for step in small_forwards(limits, page_size):
        result = runner.run(step)
        result.host_token_ids()
        result.host_logprobs()
        result.host_top()
        result.host_scores()


def _decode_beside_prefill(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """Of the slots of `step`, the first half decode once more, and the others begin again."""
    num_decode = len(step.slots) // 2
    num_tokens = step.num_tokens[num_decode:]
    begun = _first_step(num_tokens, np.zeros_like(num_tokens), limits, is_plain=True, first_slot=num_decode + 1)
    counts = np.concatenate((np.ones(num_decode, np.int32), num_tokens))
    return replace(begun, slots=step.slots, num_tokens=counts, num_decode=num_decode)


def _scored(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """As many tokens of its prompts are scored as are at once."""
    counts = np.diff(np.minimum(np.cumsum(step.num_tokens - 1), SCORED_AT_ONCE), prepend=0).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    num_top = min(_NUM_TOP, limits.vocab_size)
    return replace(step, scored=ScoredRows(rows, counts, np.zeros(int(counts.sum()), np.int32), num_top))


def _first_step(
    num_tokens: NDArray[np.int32],
    first_positions: NDArray[np.int32],
    limits: ForwardLimits,
    is_plain: bool = False,
    first_slot: int = 1,
) -> ForwardInput:
    """Opens a slot for each row, which ends its prompt. No slot owns a block: all keys and values go to the padding
    block. The first row is greedy. is_plain: no row has a sampling feature; else the first ones have each."""
    num_rows = len(num_tokens)
    num_limited = 0 if is_plain else _NUM_LIMITED_ROWS
    slots = np.arange(first_slot, first_slot + num_rows, dtype=np.int32)
    ruled = slots[:num_limited]
    is_limited = np.arange(num_rows) < num_limited
    opened = SlotOpens(
        slots=slots,
        num_prompt_tokens=first_positions + num_tokens,
        first_positions=first_positions,
        temperatures=np.minimum(np.arange(num_rows), 1).astype(np.float32),
        top_ps=np.where(is_limited, 0.9, 1.0).astype(np.float32),
        top_ks=np.where(is_limited, 2000, 0).astype(np.int32),
        min_ps=np.where(is_limited, 0.01, 0.0).astype(np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
        sample_indices=np.zeros(num_rows, np.uint32),
        want_logprobs=np.full(num_rows, not is_plain),
        rules=None if is_plain else _every_rule(ruled),
        num_top_logprobs=None if is_plain else np.full(num_rows, min(_NUM_TOP, limits.vocab_size), np.int32),
    )
    changes = SlotChanges(closed=_NOTHING, opened=opened, block_slots=_NOTHING, block_ids=_NOTHING)
    prompt_ids = np.zeros(int(num_tokens.sum()), np.int32)
    # Of the whole vocabulary, its bits behind the end included.
    bits = np.full((len(ruled), num_mask_words(limits.vocab_size)), np.iinfo(np.uint32).max, np.uint32)
    masks = None if is_plain else TokenMasks(np.arange(len(ruled), dtype=np.int32), bits)
    return ForwardInput(0, slots, num_tokens, 0, prompt_ids, changes, masks=masks)


def _every_rule(slots: NDArray[np.int32]) -> LogitRules:
    return LogitRules(
        slots=slots,
        num_request_tokens=np.zeros(len(slots), np.int32),
        presence=np.full(len(slots), 0.5, np.float32),
        frequency=np.full(len(slots), 0.5, np.float32),
        repetition=np.full(len(slots), 1.5, np.float32),
        bias_counts=np.ones(len(slots), np.int32),
        bias_ids=np.zeros(len(slots), np.int32),
        bias_values=np.full(len(slots), -1.0, np.float32),
        bias_ends=np.full(len(slots), np.iinfo(np.int32).max, np.int32),
    )
