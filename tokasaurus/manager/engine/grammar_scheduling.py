"""Grammars in steps: which sequences can decode, their token masks, and the tokens that come back.

From the step that samples its next token until its matcher has read that token, a sequence with a grammar awaits the
matcher and cannot decode.
"""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.forward import TokenMasks


def ready_to_decode(state: EngineState) -> NDArray[np.int64]:
    """Decoding slots whose next token can be sampled, in queue order. The caller must not modify the array."""
    decoding = state.queues.decoding()
    if not state.num_with_grammars:
        return decoding
    return decoding[~state.slots.awaits_matcher[decoding]]


def is_better_later(state: EngineState, ready: NDArray[np.int64], decoding: NDArray[np.int64]) -> bool:
    """Whether to delay a step in which only the slots `ready` decode, out of `decoding`, and wait for slots that await
    their matcher.

    Sequences with grammars cannot run ahead of their results. If every ready sequence has a grammar, decoding half of
    them in every other step would take twice the time of decoding all in each. If any ready sequence has no grammar,
    the step is sent now. No step waits for slow grammars, unless the grammars of all decoding sequences are slow.
    """
    if not state.num_with_grammars or not len(ready):
        return False
    slots = state.slots
    is_slow = slots.is_slow[decoding]
    is_worth_it = slots.awaits_matcher[decoding] & (~is_slow | is_slow.all())
    return bool(slots.has_grammar[ready].all() and is_worth_it.any())


def build_masks(state: EngineState, sampled: NDArray[np.int64]) -> TokenMasks | None:
    """Token masks for the step being built, in which the slots `sampled` sample; None if none has a grammar.

    The slots with grammars await their matchers from now on.
    """
    rows = np.flatnonzero(state.slots.has_grammar[sampled])
    if not len(rows):
        return None
    masks = []
    for slot in sampled[rows].tolist():
        sequence = state.sequences[slot]
        assert sequence is not None
        assert sequence.grammar_matcher is not None
        masks.append(sequence.grammar_matcher.mask)
    state.slots.awaits_matcher[sampled[rows]] = True
    return TokenMasks(rows.astype(np.int32), np.stack(masks))


def note_tokens(
    state: EngineState, slots: NDArray[np.int64], token_ids: NDArray[np.int32], has_ended: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Pass new tokens to the grammar matchers, except tokens that end their sequence. All arrays are [R].

    Returns bool [R]: the matcher decides whether the sequence ends. This includes a sequence at its token limit,
    because its last token may complete the grammar.
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
