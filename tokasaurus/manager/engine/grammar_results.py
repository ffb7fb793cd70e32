"""What grammars say: who may wait to be admitted, who may go on, and who ends."""

from tokasaurus.manager.engine.outputs import abort, end_sequence
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence


def apply_grammars(state: EngineState) -> None:
    """Take up what the threads of the grammars are done with. The sequences that end are released, with their
    deltas."""
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
            _go_on(state, sequence)


def _go_on(state: EngineState, sequence: Sequence) -> None:
    arrays, slot, grammar_matcher = state.slots, sequence.slot, sequence.grammar_matcher
    assert grammar_matcher is not None
    if grammar_matcher.error or grammar_matcher.is_complete:
        end_sequence(state, slot, is_stop=True, error=grammar_matcher.error)
    elif not grammar_matcher.wants_mask:
        end_sequence(state, slot, is_stop=False)
    else:
        arrays.is_held[slot] = False
