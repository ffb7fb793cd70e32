"""Replays the engine from a given state, step by step, without another admission."""

import copy
from collections import deque

import numpy as np

from tests.manager.helpers.fake_prompt_logprobs import zero_prompt_logprobs
from tokasaurus.manager.engine.engine import next_step, ready_to_decode
from tokasaurus.manager.engine.input_building import num_blocks_short
from tokasaurus.manager.engine.outputs import apply_output, release_ending
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.forward import ForwardOutput


def copy_state(state: EngineState) -> EngineState:
    """A copy to run ahead on; it shares the objects that never change."""
    sequences = [sequence for samples in state.unfinished.values() for sequence in samples.sequences]
    constant = [
        state.options,
        state.grammars,
        *(sequence.request for sequence in sequences),
        *(sequence.prompt for sequence in sequences),
    ]
    return copy.deepcopy(state, {id(thing): thing for thing in constant})


def replay_usage(state: EngineState) -> list[int]:
    """Blocks in use now and after each further step, until the last sequence has ended and its blocks are free.

    Sequences end only at max_new_tokens. Each result arrives as late as possible: before the step that would exceed
    scheduling_steps_ahead. If blocks run out, the list ends early with a number larger than the pool.
    """
    state = copy_state(state)
    seconds, num_ahead = state.step_seconds, state.options.config.scheduling_steps_ahead
    assert seconds is not None
    planned = deque(range(1 - len(state.steps_in_flight), 1))  # the newest step sent is step 0
    used = [state.blocks.num_used]
    while state.slots.num_running:
        step = len(used)
        while planned and planned[0] <= step - num_ahead:
            planned.popleft()
            oldest = state.steps_in_flight[0]
            token_ids = np.ones(len(oldest.sampled), np.int32)
            prompt_logprobs = zero_prompt_logprobs(oldest)
            apply_output(
                state, ForwardOutput(oldest.step_id, token_ids, None, seconds, prompt_logprobs=prompt_logprobs)
            )
            release_ending(state)
        num_short = num_blocks_short(state, ready_to_decode(state))
        if num_short > 0:
            return [*used, state.blocks.num_blocks + num_short]
        if next_step(state) is not None:
            planned.append(step)
        used.append(state.blocks.num_used)
    assert used[-1] == 0
    return used
