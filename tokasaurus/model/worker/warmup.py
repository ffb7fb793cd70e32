"""Warm-up forwards, run at start-up.

Either the largest forwards: if they fit in memory, every later one does; they also trigger compilation. Or, if the
memory of the largest forward is known and reserved (memory.py), a small forward of each kind, so that no
request waits for lazy loading.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import (
    ForwardInput,
    LogitRules,
    PrefixGroups,
    PromptLogprobsInput,
    SlotChanges,
    SlotOpens,
    TokenMasks,
)
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, LIMITS, PENALTIES, SamplingParams
from tokasaurus.model.buffer_sizes import LOGPROBS_AT_ONCE, num_mask_words, ruled_rows_at_once
from tokasaurus.model.execution.runner import ModelRunner

_NUM_LIMITED_ROWS = 64
"""Rows with limits, masks and logprobs after these. Sampling handles rows in chunks, so one chunk is enough; limits are
slow on the flat logits of an artificial prompt."""

_NUM_TOP = 20
"""Top-k logprobs of each sampled token and each prompt token: they take little memory."""

_SMALL_ROWS = 4
"""Rows of a small forward."""

_SMALL_TOKENS = 2
"""Prompt tokens of each row of a small forward."""

_NUM_SINGLE = 4
"""Forwards of one token that are timed. A fixed number: all ranks run the same steps."""

_PAIR_TOKENS = {"cpu": (32, 2048), "cuda": (2048, 16_384)}
"""Tokens of the chunk that is timed without and with a context, and tokens of that context, by type of device.

The context is so long that its time can be told from noise, and so short that the start is hardly longer."""

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class WarmUpTimes:
    """What forwards of the warm-up took, in seconds."""

    per_token: float
    """Least seconds per token of any forward."""

    single_token: float
    """Seconds of the shortest forward of one token."""

    per_pair: float
    """Seconds of attention per pair of a token and a token of its context; 0 if a long context took no time."""


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """The limits that decide how large a forward can be."""

    max_tokens: int
    """Most tokens in one forward."""

    max_seqs: int
    """Most sequences in one forward."""

    context_length: int
    """Tokens of the longest sequence."""

    vocab_size: int
    """The model's vocabulary."""

    has_groups: bool = True
    """Whether steps may have prefix groups."""

    has_adapters: bool = False
    """Whether Triton kernels compute adapters."""


def widest_prefill(limits: ForwardLimits) -> ForwardInput:
    """A prefill with a forward's most tokens and sampling rows, and prompt logprobs for LOGPROBS_AT_ONCE tokens."""
    num_rows = min(limits.max_seqs, limits.max_tokens)
    shares = np.full(num_rows, limits.max_tokens // num_rows, np.int32)
    shares[: limits.max_tokens % num_rows] += 1
    num_tokens = np.minimum(shares, limits.context_length)
    step = _first_step(num_tokens, np.zeros(num_rows, np.int32), limits)
    return _with_prompt_logprobs(step, limits)


def longest_prefill(limits: ForwardLimits) -> ForwardInput:
    """The end of a sequence that fills the context, in one chunk."""
    chunk = min(limits.max_tokens, limits.context_length)
    return _first_step(np.array([chunk], np.int32), np.array([limits.context_length - chunk], np.int32), limits)


def longest_last_tokens(limits: ForwardLimits) -> ForwardInput:
    """A step with the most rows of a forward, each the last token of a sequence that fills the context."""
    num_rows = min(limits.max_seqs, limits.max_tokens)
    return _first_step(np.ones(num_rows, np.int32), np.full(num_rows, limits.context_length - 1, np.int32), limits)


def decode_after(step: ForwardInput) -> ForwardInput:
    """A step in which each slot of `step` decodes one token."""
    changes = SlotChanges(closed=_NOTHING, opened=None, block_slots=_NOTHING, block_ids=_NOTHING)
    return ForwardInput(0, step.slots, np.ones_like(step.num_tokens), len(step.slots), _NOTHING, changes)


def rows_after_a_block(num_rows: int, limits: ForwardLimits, page_size: int) -> ForwardInput:
    """Each row computes its first token after a block, the padding block, which all of them share."""
    ones = np.ones(num_rows, np.int32)
    return _first_step(ones, ones * np.int32(page_size), limits, is_plain=True)


def single_token(limits: ForwardLimits) -> ForwardInput:
    """The smallest forward, without any sampling feature."""
    return _first_step(np.ones(1, np.int32), np.zeros(1, np.int32), limits, is_plain=True)


OnForward = Callable[[int, int], None]
"""Told after each forward how many have run, and how many there are."""


def _ignore_forward(_num_done: int, _num_total: int) -> None: ...


def warm_up(
    runner: ModelRunner,
    limits: ForwardLimits,
    page_size: int,
    is_context_costly: bool,
    on_forward: OnForward = _ignore_forward,
) -> WarmUpTimes:
    """Run the largest forwards and small ones of each kind and shape.

    The largest are the widest prefill, without and with adapters, and a decode after it; and, if is_context_costly
    (attention's memory grows with the context), the longest ones.

    The slots stay open in the worker. This is harmless: the manager opens a slot before it uses it.
    """
    widest = widest_prefill(limits)
    steps = [widest]
    if limits.context_length > int(widest.num_tokens.max()):
        steps.append(decode_after(widest))
    if limits.has_adapters:
        steps.append(_with_adapters(widest))
    if is_context_costly:
        steps += [longest_prefill(limits), longest_last_tokens(limits)]
    shapes = limits.max_tokens, limits.max_seqs, limits.context_length, page_size, limits.has_groups
    num_forwards = len(steps) + sum(1 for _ in steps_of_all_classes(*shapes))
    num_small = _num_small(limits, page_size)
    per_token = inf
    for number, step in enumerate(itertools.chain(steps, steps_of_all_classes(*shapes)), start=1):
        per_token = min(per_token, _seconds_per_token(runner, step))
        on_forward(number, num_forwards + num_small)
    small = warm_up_small(
        runner, limits, page_size, lambda done, total: on_forward(num_forwards + done, num_forwards + total)
    )
    return replace(small, per_token=min(per_token, small.per_token))


def small_forwards(limits: ForwardLimits, page_size: int) -> Iterator[ForwardInput]:
    """A small forward of each kind; run each before taking the next.

    With every sampling feature: prefill with prompt logprobs, then decode. The same prefill without masks, and one each
    with limits, with top-k logprobs and with masks alone: Triton compiles a variant of a kernel for each. With none:
    prefill, decode together with prefill, both with adapters, decode in a prefix group, and a single token, in case a
    compiler treats a size of 1 specially.
    """
    num_rows = min(_SMALL_ROWS, limits.max_seqs, limits.max_tokens)
    num_tokens = np.full(num_rows, min(_SMALL_TOKENS, limits.max_tokens // num_rows, limits.context_length), np.int32)
    start = np.zeros(num_rows, np.int32)
    prefill = _first_step(num_tokens, start, limits)
    yield replace(prefill, masks=None)
    yield _with_limits_alone(prefill)
    yield _with_logprobs(_first_step(num_tokens, start, limits, is_plain=True), limits)
    yield replace(_first_step(num_tokens, start, limits, is_plain=True), masks=prefill.masks)
    yield _with_prompt_logprobs(prefill, limits)
    if limits.context_length > num_tokens[0]:
        yield replace(decode_after(prefill), masks=prefill.masks)
        plain = _first_step(num_tokens, start, limits, is_plain=True)
        yield plain
        yield _decode_with_prefill(plain, limits)
        if limits.has_adapters:
            yield _with_adapters(plain)
            yield decode_after(plain)
    if limits.has_groups and limits.context_length > page_size + 1:
        after_block = rows_after_a_block(num_rows, limits, page_size)
        yield after_block
        groups = PrefixGroups(np.array([num_rows], np.int32), np.ones(1, np.int32))
        yield replace(decode_after(after_block), groups=groups)
    yield single_token(limits)


def _with_adapters(step: ForwardInput) -> ForwardInput:
    """`step`, which opens slots, with an adapter that adds nothing in all rows: the kernels are launched."""
    opened = step.changes.opened
    assert opened is not None
    opened = replace(opened, adapters=np.ones(len(opened.slots), np.int32))
    return replace(step, changes=replace(step.changes, opened=opened))


def _with_limits_alone(step: ForwardInput) -> ForwardInput:
    """`step`, which opens slots, without masks and rules. Tensor-parallel ranks then sample whole rows of logits."""
    opened = step.changes.opened
    assert opened is not None
    return replace(step, masks=None, changes=replace(step.changes, opened=replace(opened, rules=None)))


def _with_logprobs(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """`step`, which opens slots, with top-k logprobs of all rows. If it has no masks, rules and limits, tensor-parallel
    ranks find the most likely tokens of their shards of the vocabulary."""
    opened = step.changes.opened
    assert opened is not None
    opened = replace(
        opened,
        want_logprobs=np.ones(len(opened.slots), np.bool_),
        num_top_logprobs=np.full(len(opened.slots), min(_NUM_TOP, limits.vocab_size), np.int32),
    )
    return replace(step, changes=replace(step.changes, opened=opened))


def _num_small(limits: ForwardLimits, page_size: int) -> int:
    return sum(1 for _ in small_forwards(limits, page_size)) + _NUM_SINGLE


def warm_up_small(
    runner: ModelRunner, limits: ForwardLimits, page_size: int, on_forward: OnForward = _ignore_forward
) -> WarmUpTimes:
    """Run the small forwards and read their results as the step loop does. Leaves slots open, as `warm_up` does."""
    num_forwards, seconds = _num_small(limits, page_size), list[float]()
    singles = (single_token(limits) for _ in range(_NUM_SINGLE))
    for step in itertools.chain(small_forwards(limits, page_size), singles):
        seconds.append(_seconds_per_token(runner, step))
        on_forward(len(seconds), num_forwards)
    return WarmUpTimes(min(seconds), min(seconds[-_NUM_SINGLE:]), _seconds_per_pair(runner, limits))


def _seconds_per_pair(runner: ModelRunner, limits: ForwardLimits) -> float:
    """Time of a chunk of a prompt after a context, less the time of the same chunk without one, for each pair.

    Every block of the context is the padding block, so its keys and values come from the processor's caches. For a
    chunk of many tokens this makes little difference: attention is bound by its arithmetic.
    """
    num_tokens, num_context = _PAIR_TOKENS[runner.device.type]
    num_tokens = min(num_tokens, limits.max_tokens, limits.context_length // 2)
    num_context = min(num_context, limits.context_length - num_tokens)
    if min(num_tokens, num_context) < 1:
        return 0.0
    first = _seconds_per_token(runner, _chunk(num_tokens, 0, limits))
    after = _seconds_per_token(runner, _chunk(num_tokens, num_context, limits))
    return max(0.0, after - first) / num_context


def _chunk(num_tokens: int, num_computed: int, limits: ForwardLimits) -> ForwardInput:
    """The end of a prompt, without any sampling feature."""
    counts, starts = np.array([num_tokens], np.int32), np.array([num_computed], np.int32)
    return _first_step(counts, starts, limits, is_plain=True)


def _seconds_per_token(runner: ModelRunner, step: ForwardInput) -> float:
    """Run the step and read its results."""
    began_s = time.perf_counter()
    result = runner.run(step)
    if result is not None:
        result.output()
    return (time.perf_counter() - began_s) / int(step.num_tokens.sum())


def _decode_with_prefill(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """The first half of the slots of `step` decode a token; the others are opened again and prefill."""
    num_decode = len(step.slots) // 2
    num_tokens = step.num_tokens[num_decode:]
    begun = _first_step(num_tokens, np.zeros_like(num_tokens), limits, is_plain=True, first_slot=num_decode + 1)
    counts = np.concatenate((np.ones(num_decode, np.int32), num_tokens))
    return replace(begun, slots=step.slots, num_tokens=counts, num_decode=num_decode)


def _with_prompt_logprobs(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """`step` with prompt logprobs for up to LOGPROBS_AT_ONCE of its prompt tokens."""
    counts = np.diff(np.minimum(np.cumsum(step.num_tokens - 1), LOGPROBS_AT_ONCE), prepend=0).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    num_top = min(_NUM_TOP, limits.vocab_size)
    return replace(
        step, prompt_logprobs=PromptLogprobsInput(rows, counts, np.zeros(int(counts.sum()), np.int32), num_top)
    )


def _first_step(
    num_tokens: NDArray[np.int32],
    first_positions: NDArray[np.int32],
    limits: ForwardLimits,
    is_plain: bool = False,
    first_slot: int = 1,
) -> ForwardInput:
    """Open a slot for each row; each row prefills the end of its prompt.

    No slot owns a block: all keys and values go to the padding block. The first row is greedy.
    is_plain: no row has a sampling feature; otherwise the first _NUM_LIMITED_ROWS rows have limits, masks and logprobs
    of the distribution that is drawn from, and as many as are changed at once have rules.
    """
    num_rows = len(num_tokens)
    slots = np.arange(first_slot, first_slot + num_rows, dtype=np.int32)
    masked, ruled = slots[:_NUM_LIMITED_ROWS], slots[: max(_NUM_LIMITED_ROWS, ruled_rows_at_once(limits.vocab_size))]
    sampling = np.array([SamplingParams()] * num_rows, SAMPLING_DTYPE)
    if not is_plain:
        for names, count in ((LIMITS, len(masked)), (PENALTIES, len(ruled))):
            for name in names:
                sampling[name][:count] = CLIENT_PARAMETERS[name].weak
    sampling["temperature"][:1] = 0
    opened = plain_opens(slots, first_positions + num_tokens, first_positions)
    opened = replace(opened, sampling=sampling, want_logprobs=np.full(num_rows, not is_plain))
    if not is_plain:
        opened = replace(
            opened,
            rules=_rules(ruled),
            num_top_logprobs=np.full(num_rows, min(_NUM_TOP, limits.vocab_size), np.int32),
            logprobs_as_sampled=np.isin(slots, masked),
        )
    changes = SlotChanges(closed=_NOTHING, opened=opened, block_slots=_NOTHING, block_ids=_NOTHING)
    prompt_ids = np.zeros(int(num_tokens.sum()), np.int32)
    # Allow the whole vocabulary, and set the unused bits after its end too.
    bits = np.full((len(masked), num_mask_words(limits.vocab_size)), np.iinfo(np.uint32).max, np.uint32)
    masks = None if is_plain else TokenMasks(np.arange(len(masked), dtype=np.int32), bits)
    return ForwardInput(0, slots, num_tokens, 0, prompt_ids, changes, masks=masks)


def plain_opens(
    slots: NDArray[np.int32], num_prompt_tokens: NDArray[np.int32], first_positions: NDArray[np.int32]
) -> SlotOpens:
    """Each slot [n] samples, with a seed of its own, and without any other feature."""
    return SlotOpens(
        slots=slots,
        num_prompt_tokens=num_prompt_tokens,
        first_positions=first_positions,
        sampling=np.array([SamplingParams()] * len(slots), SAMPLING_DTYPE),
        seeds=np.arange(len(slots), dtype=np.uint64),
        sample_indices=np.zeros(len(slots), np.uint32),
        want_logprobs=np.zeros(len(slots), np.bool_),
    )


def _rules(slots: NDArray[np.int32]) -> LogitRules:
    return LogitRules(
        slots=slots,
        num_request_tokens=np.zeros(len(slots), np.int32),
        bias_counts=np.ones(len(slots), np.int32),
        bias_ids=np.zeros(len(slots), np.int32),
        bias_values=np.full(len(slots), -1.0, np.float32),
        bias_ends=np.full(len(slots), np.iinfo(np.int32).max, np.int32),
    )


class _Rows(NamedTuple):
    """A step: its decode rows, and for each prefill row its tokens and whether they end its prompt."""

    num_decode: int = 0
    prefill: tuple[tuple[int, bool], ...] = ()
    is_grouped: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_decode + len(self.prefill)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(count for count, _ in self.prefill)


_END, _PART = True, False
_PREFILL = (
    *(((1, _PART),), ((1, _END),)),
    *(((2, _PART),), ((2, _END),), ((1, _END), (1, _END))),
    *(((3, _PART),), ((3, _END),), ((1, _END), (2, _END)), ((1, _END), (1, _END), (1, _END))),
)
_BESIDE_DECODE = {
    1: (((1, _PART),), ((1, _END),), ((2, _PART),), ((2, _END),), ((1, _END), (1, _END))),
    2: (((1, _PART),), ((1, _END),)),
    3: (((1, _PART),),),
}
_STEPS = (
    *(_Rows(prefill=prefill) for prefill in _PREFILL),
    *(_Rows(num_decode) for num_decode in (1, 2, 3)),
    *(_Rows(num_decode, prefill) for num_decode, prefills in _BESIDE_DECODE.items() for prefill in prefills),
    *(_Rows(num_decode, is_grouped=True) for num_decode in (1, 2, 3)),
    *(
        _Rows(num_decode, prefill, is_grouped=True)
        for num_decode, prefills in _BESIDE_DECODE.items()
        for prefill in prefills
    ),
)


def steps_of_all_classes(
    max_tokens: int, max_seqs: int, context_length: int, page_size: int, has_groups: bool = True
) -> Iterator[ForwardInput]:
    """A step of each class that fits in the limits of a forward; each must run before the next is taken.

    Before a step with decode rows comes one that opens their slots, after a block of a prompt that a group can share.
    No slot owns a block: all keys and values go to the padding block.
    """
    for rows in _STEPS:
        if rows.num_tokens > max_tokens or rows.num_rows > max_seqs or (rows.is_grouped and not has_groups):
            continue
        if rows.num_decode:
            if context_length < page_size + 2:
                continue
            opened = [(1, _END)] * rows.num_decode
            yield _step_of(_Rows(prefill=tuple(opened)), first_position=page_size)
        elif context_length < rows.num_tokens + 1:
            continue
        yield _step_of(rows)


def _step_of(rows: _Rows, first_position: int = 0) -> ForwardInput:
    """first_position: of the prefill rows' tokens. Their slots come after the decode rows' slots, which are 1 and
    on."""
    slots = np.arange(1, rows.num_rows + 1, dtype=np.int32)
    counts = np.array([count for count, _ in rows.prefill], np.int32)
    lengths = first_position + counts + np.array([not is_end for _, is_end in rows.prefill], np.int32)
    opened = None
    if rows.prefill:
        opened = plain_opens(slots[rows.num_decode :], lengths.astype(np.int32), np.full_like(counts, first_position))
    groups = None
    if rows.is_grouped:
        groups = PrefixGroups(np.array([rows.num_decode], np.int32), np.ones(1, np.int32))
    return ForwardInput(
        step_id=0,
        slots=slots,
        num_tokens=np.concatenate((np.ones(rows.num_decode, np.int32), counts)),
        num_decode=rows.num_decode,
        prompt_ids=np.zeros(int(counts.sum()), np.int32),
        changes=SlotChanges(closed=_NOTHING, opened=opened, block_slots=_NOTHING, block_ids=_NOTHING),
        groups=groups,
    )
