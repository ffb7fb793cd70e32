"""Commands from the server: pause and go on, abort requests, forget cached prefixes; by the workers, new weights, sleep
and wake.

A pause preempts what runs: sequences wait with their tokens, and compute their KV again or find it in the prefix tree
when they go on. So new weights never meet a running step, and the prefix tree has no block that is in use."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.lifecycle import release, set_back
from tokasaurus.manager.engine.outputs import check_stop_strings, end_waiting, release_all_ending
from tokasaurus.manager.engine.requests import queue_to_end
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Samples
from tokasaurus.messages.commands import (
    AbortRequests,
    ClearCache,
    CommandDone,
    EngineCommand,
    LoadAdapter,
    Pause,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WorkerCommand,
    add_update,
)


def run_commands(state: EngineState, send: Callable[[WorkerCommand], None] | None) -> None:
    """Carry out as many commands as can be now, in order, and add their ends to `state.done`. send: to the workers."""
    while state.commands and state.sent_command is None:
        command = state.commands[0]
        if isinstance(command, Pause):
            state.is_paused = True  # no further steps
            if not _is_quiet(state):
                return
        elif isinstance(command, AbortRequests):
            if any(_is_read(state, samples) for samples in _samples_of(state, command)):
                return
        elif isinstance(command, WorkerCommand) and _refusal(state, command) == "":
            assert send is not None, "an engine whose workers take commands"
            if isinstance(command, Sleep):
                _clear_cache(state)
            elif isinstance(command, UnloadAdapter):  # before the next step, which would place it
                state.adapters.forget(command.digest)
            state.sent_command = command
            send(command)
            return
        state.commands.popleft()
        state.done.append(CommandDone(command.command_id, _carry_out(state, command)))


def _carry_out(state: EngineState, command: EngineCommand) -> str:
    """Why it cannot be done, or ""."""
    match command:
        case Pause():
            _stop_all(state)
            if command.aborts:
                _end_waiting(state, list(state.unfinished.values()))
        case AbortRequests():
            check_stop_strings(state)  # before sampled tokens become part of the prompt
            release_all_ending(state)
            for samples in _samples_of(state, command):
                for sequence in samples.sequences:
                    if sequence.phase is not Phase.WAITING:
                        set_back(state, sequence)
                _end_waiting(state, [samples])
        case Resume():
            if state.is_asleep:
                return "the engine sleeps"
            state.is_paused = False
            state.admission.blocked_at = None
        case ClearCache():
            if state.slots.num_running:
                return "sequences are running"
            _clear_cache(state)
        case UpdateWeights() | Sleep() | Wake() | LoadAdapter() | UnloadAdapter():
            return _refusal(state, command)
    return ""


def _refusal(state: EngineState, command: WorkerCommand) -> str:
    """Why the workers cannot be given the command now, or ""."""
    if isinstance(command, LoadAdapter | UnloadAdapter):
        return ""
    if not state.is_paused:
        return "the engine is not paused"
    return "the engine sleeps" if isinstance(command, UpdateWeights) and state.is_asleep else ""


def forget_commands(state: EngineState) -> None:
    """Nobody waits for them any more. The workers finish the one that they have; a pause that was begun holds."""
    state.commands = deque([] if state.sent_command is None else [state.sent_command])
    state.done = []


def note_done(state: EngineState, done: CommandDone) -> None:
    """The workers have answered the command that was sent."""
    command, state.sent_command = state.sent_command, None
    assert command is not None
    assert command is state.commands.popleft()
    state.done.append(done)
    if done.error:
        return
    match command:
        case UpdateWeights():
            _note_update(state, command)
        case Sleep() | Wake():
            state.is_asleep = isinstance(command, Sleep)
        case LoadAdapter():
            state.adapters.loaded[command.digest] = None
        case UnloadAdapter():
            pass


def _note_update(state: EngineState, update: UpdateWeights) -> None:
    if update.clears_cache:
        _clear_cache(state)
    for samples in state.unfinished.values():
        if samples.request.adapter:  # whose version is the adapter's
            continue
        for sequence in samples.sequences:
            if num_tokens := len(sequence.kept_token_ids):
                earlier = [span for span in sequence.weight_versions or state.weight_versions if span[0] < num_tokens]
                sequence.weight_versions = (*earlier, (num_tokens, update.version))
    state.weight_versions = ((0, update.version),)
    add_update(state.weight_updates, replace(update, command_id=0))


def _is_quiet(state: EngineState) -> bool:
    """No step is running, and no grammar matcher reads a token."""
    return not state.steps_in_flight and not _read_slots(state).any()


def _read_slots(state: EngineState) -> NDArray[np.bool_]:
    """Whether the grammar matcher of a slot's sequence reads its newest token, bool [slots]."""
    slots = state.slots
    is_read: NDArray[np.bool_] = (
        slots.is_running & slots.awaits_matcher & (slots.num_known_tokens > slots.num_kv_tokens)
    )
    return is_read


def _is_read(state: EngineState, samples: Samples) -> bool:
    """Whether a grammar matcher of the request reads a token."""
    slots = [sequence.slot for sequence in samples.sequences if sequence.phase is not Phase.WAITING]
    return bool(_read_slots(state)[slots].any())


def _samples_of(state: EngineState, command: AbortRequests) -> list[Samples]:
    """Samples of the requests that the command ends."""
    ids = command.request_ids
    found = [state.unfinished[request_id] for request_id in ids if request_id in state.unfinished]
    if not command.only_waiting:
        return found
    return [samples for samples in found if all(one.phase is Phase.WAITING for one in samples.sequences)]


def _stop_all(state: EngineState) -> None:
    """All running sequences wait, those first that were admitted first."""
    check_stop_strings(state)  # before sampled tokens become part of the prompt
    release_all_ending(state)
    while state.cancelled:
        sequence = state.cancelled.popleft()
        if sequence.phase is not Phase.FINISHED:
            release(state, sequence)
    slots = np.flatnonzero(state.slots.is_running)
    for slot in slots[np.argsort(-state.slots.admitted_at[slots], kind="stable")].tolist():
        set_back(state, state.slots.sequence(slot))
    state.has_had_work = False  # the device does not idle, it rests


def _end_waiting(state: EngineState, requests: Iterable[Samples]) -> None:
    """Abort these requests. Precondition: all their sequences wait."""
    for samples in requests:
        queue_to_end(state, samples)
        while samples.num_to_create:
            samples.create()
        for sequence in list(samples.sequences):
            end_waiting(state, sequence, "abort")


def _clear_cache(state: EngineState) -> None:
    """Precondition: no sequence runs."""
    state.blocks.free(state.blocks.tree.evict(state.blocks.tree.num_unused_blocks))
