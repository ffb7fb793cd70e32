"""What the engine really does from some moment on, step by step, when nobody else is admitted."""

import copy
from collections import deque

import numpy as np

from tests.manager.helpers.fake_prompt_logprobs import zero_prompt_logprobs
from tokasaurus.manager.engine.engine import next_step
from tokasaurus.manager.engine.grammar_scheduling import ready_to_decode
from tokasaurus.manager.engine.input_building import num_blocks_short
from tokasaurus.manager.engine.outputs import apply_output
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.forward import ForwardOutput


def copy_state(state: EngineState) -> EngineState:
    """A copy for trying out; what never changes is shared with it."""
    sequences = [sequence for siblings in state.unfinished.values() for sequence in siblings]
    constant = [
        state.options,
        state.grammars,
        *(sequence.request for sequence in sequences),
        *(sequence.prompt for sequence in sequences),
    ]
    return copy.deepcopy(state, {id(thing): thing for thing in constant})


def replay_usage(state: EngineState) -> list[int]:
    """Blocks in use now and after each further step, until the last sequence has ended and its blocks are back.

    Sequences end by their length alone. Each result comes as late as it may: before the step that would be one too many
    with the worker. Ends early, with a number that no pool has, where blocks are missing.
    """
    state = copy_state(state)
    seconds, num_ahead = state.step_seconds, state.options.max_steps_ahead
    assert seconds is not None
    planned = deque(range(1 - len(state.steps_in_flight), 1))  # the newest of those that are sent is step 0
    used = [state.blocks.num_used]
    while state.num_running:
        step = len(used)
        while planned and planned[0] <= step - num_ahead:
            planned.popleft()
            oldest = state.steps_in_flight[0]
            token_ids = np.ones(len(oldest.sampled), np.int32)
            prompt_logprobs = zero_prompt_logprobs(oldest)
            apply_output(
                state, ForwardOutput(oldest.step_id, token_ids, None, seconds, prompt_logprobs=prompt_logprobs)
            )
        num_short = num_blocks_short(state, ready_to_decode(state))
        if num_short > 0:
            return [*used, state.blocks.num_blocks + num_short]
        if next_step(state) is not None:
            planned.append(step)
        used.append(state.blocks.num_used)
    assert used[-1] == 0
    return used
