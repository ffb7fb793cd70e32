"""Sequences with grammars in steps: who may take part, the masks, and the tokens that come back."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.forward import TokenMasks


def ready_to_decode(state: EngineState) -> NDArray[np.int64]:
    """The decoding slots whose next token may be sampled, in their order. Not to be changed."""
    decoding = state.queues.decoding()
    if not state.num_with_grammars:
        return decoding
    return decoding[~state.slots.is_held[decoding]]


def is_better_later(state: EngineState, ready: NDArray[np.int64]) -> bool:
    """Whether a step of `ready` alone, which decode, had better wait for those that are held.

    Where all have grammars there is no running ahead, and half of them in every other step would take as many steps
    for each as all in one, in twice the time. Others run ahead, with those that are ready; and nobody waits for slow
    grammars, but where all are slow.
    """
    if not state.num_with_grammars or not len(ready):
        return False
    slots = state.slots
    decoding = state.queues.decoding()
    is_slow = slots.is_slow[decoding]
    is_worth_it = slots.is_held[decoding] & (~is_slow | is_slow.all())
    return bool(slots.has_grammar[ready].all() and is_worth_it.any())


def build_masks(state: EngineState, sampled: NDArray[np.int64]) -> TokenMasks | None:
    """For the step at hand, in which the slots `sampled` sample: those of them that have grammars are held from now
    on."""
    rows = np.flatnonzero(state.slots.has_grammar[sampled])
    if not len(rows):
        return None
    masks = []
    for slot in sampled[rows].tolist():
        sequence = state.sequences[slot]
        assert sequence is not None
        assert sequence.grammar_matcher is not None
        masks.append(sequence.grammar_matcher.mask)
    state.slots.is_held[sampled[rows]] = True
    return TokenMasks(rows.astype(np.int32), np.stack(masks))


def note_tokens(
    state: EngineState, slots: NDArray[np.int64], token_ids: NDArray[np.int32], has_ended: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Tokens have come back, of which some end their sequences: the others are given to the grammars. All [R].

    Gives whose end is up to a grammar, [R]: even the last token that a sequence may have may complete it.
    """
    arrays, grammars = state.slots, state.grammars
    has_grammar = arrays.has_grammar[slots] & ~has_ended
    rows = np.flatnonzero(has_grammar)
    if len(rows):
        assert grammars is not None
        slots = slots[rows]
        wants_mask = arrays.num_known_tokens[slots] <= arrays.max_kv_tokens[slots]
        columns = (slots.tolist(), token_ids[rows].tolist(), wants_mask.tolist())
        for slot, token_id, wants in zip(*columns, strict=True):
            sequence = state.sequences[slot]
            assert sequence is not None
            grammars.note(sequence, token_id, wants)
    return has_grammar
