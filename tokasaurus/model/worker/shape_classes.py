"""The shape classes of steps, and a small step of each for the warm-up.

A compiler, a matrix library or a captured graph may treat sizes of 0, 1 and 2 in ways of their own. What a step
computes beside its tokens (rules, masks, logprobs) does not depend on its class; warmup.py has steps for these.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokasaurus.messages.forward import ForwardInput, PrefixGroups, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE, SamplingParams

_NOTHING = np.zeros(0, np.int32)
_MANY = 3


class ShapeClass(NamedTuple):
    """What steps of one class have in common."""

    num_tokens: int
    """1, 2, or 3 for more."""
    num_decode: int
    """0, 1, 2, or 3 for more."""
    has_prefill: bool
    num_sampled: int
    """0, 1, 2, or 3 for more."""
    is_grouped: bool
    """Some decode rows are in a prefix group."""


def shape_class(step: ForwardInput, num_sampled: int) -> ShapeClass:
    """num_sampled: rows that sample; prefill rows do at the ends of their prompts."""
    return ShapeClass(
        min(int(step.num_tokens.sum()), _MANY),
        min(step.num_decode, _MANY),
        step.num_decode < len(step.slots),
        min(num_sampled, _MANY),
        step.groups is not None,
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


def steps_of_all_classes(max_tokens: int, max_seqs: int, context_length: int, page_size: int) -> Iterator[ForwardInput]:
    """A step of each class that fits in the limits of a forward; each must run before the next is taken.

    Before a step with decode rows comes one that opens their slots, after a block of a prompt that a group can share.
    No slot owns a block: all keys and values go to the padding block.
    """
    for rows in _STEPS:
        if rows.num_tokens > max_tokens or rows.num_rows > max_seqs:
            continue
        if rows.num_decode:
            if context_length < page_size + 2:
                continue
            opened = [(1, _END)] * rows.num_decode
            yield _step(_Rows(prefill=tuple(opened)), first_position=page_size)
        elif context_length < rows.num_tokens + 1:
            continue
        yield _step(rows)


def _step(rows: _Rows, first_position: int = 0) -> ForwardInput:
    """first_position: of the prefill rows' tokens. Their slots come after those of the decode rows, 1 and on."""
    slots = np.arange(1, rows.num_rows + 1, dtype=np.int32)
    counts = np.array([count for count, _ in rows.prefill], np.int32)
    lengths = first_position + counts + np.array([not is_end for _, is_end in rows.prefill], np.int32)
    num_opened = len(rows.prefill)
    opened = None
    if num_opened:
        opened = SlotOpens(
            slots=slots[rows.num_decode :],
            num_prompt_tokens=lengths.astype(np.int32),
            first_positions=np.full(num_opened, first_position, np.int32),
            sampling=np.array([SamplingParams()] * num_opened, SAMPLING_DTYPE),
            seeds=np.arange(num_opened, dtype=np.uint64),
            sample_indices=np.zeros(num_opened, np.uint32),
            want_logprobs=np.zeros(num_opened, np.bool_),
        )
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
