"""Apply results from the grammar threads: queue sequences for admission, resume them, or end them."""

from tokasaurus.manager.engine.outputs import abort, end_sequence
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence


def apply_grammars(state: EngineState) -> None:
    """Apply what the grammar threads have finished. Sequences that end are released and their deltas added."""
    assert state.grammars is not None
    begun, read = state.grammars.take()
    for sequence, error in begun:
        if sequence.phase is Phase.FINISHED:
            continue
        if error:
            abort(state, sequence, error)
        else:
            state.queues.unblock(sequence)
    for sequence in read:
        if sequence.phase is not Phase.FINISHED:
            _resume_or_end(state, sequence)


def _resume_or_end(state: EngineState, sequence: Sequence) -> None:
    """Handle a sequence whose grammar matcher has read its newest token."""
    arrays, slot, grammar_matcher = state.slots, sequence.slot, sequence.grammar_matcher
    assert grammar_matcher is not None
    if grammar_matcher.error or grammar_matcher.is_complete:
        end_sequence(state, slot, is_stop=True, error=grammar_matcher.error)
    elif not grammar_matcher.wants_mask:
        end_sequence(state, slot, is_stop=False)
    else:
        arrays.awaits_matcher[slot] = False
