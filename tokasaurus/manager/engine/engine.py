"""One step of the manager: apply messages and results, run deferred tasks if there is time, send steps."""

import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.admission import admit_waiting, can_admit
from tokasaurus.manager.engine.deferred_tasks import DeferredTask, may_run
from tokasaurus.manager.engine.grammar_results import apply_grammars
from tokasaurus.manager.engine.grammar_scheduling import is_better_later, ready_to_decode
from tokasaurus.manager.engine.input_building import num_blocks_short, start_step
from tokasaurus.manager.engine.length_updates import forecast_is_old, note_ends, update_forecast
from tokasaurus.manager.engine.lifecycle import find_starts, preempt
from tokasaurus.manager.engine.outputs import apply_output, check_stop_strings, stream_new_tokens
from tokasaurus.manager.engine.requests import add_request, cancel_request
from tokasaurus.manager.planning.prefix_groups import group_by_prefix
from tokasaurus.manager.planning.shared_blocks import find_shared_blocks
from tokasaurus.manager.planning.step_budget import num_steps_to_keep_in_flight, split_prefill
from tokasaurus.manager.planning.victims import choose_victims
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.monitoring.timing import SectionTimers

MOST_READING_SECONDS = 0.002
"""Longest time a step waits for grammar matchers to read tokens, in seconds."""


class Engine:
    """Schedules one engine. Calls `send` with each step for the worker.

    tasks: the deferred tasks, most urgent first. timers: seconds spent in each part of `step`.
    """

    def __init__(self, state: EngineState, send: Callable[[ForwardInput], None]) -> None:
        self.state = state
        self.timers = SectionTimers()
        self._send = send
        self._step_began_s = 0.0
        self.tasks = [
            DeferredTask("admission", can_admit, admit_waiting, max_steps_deferred=4),
            DeferredTask("stop strings", lambda state: state.has_uncounted, check_stop_strings, max_steps_deferred=8),
            DeferredTask("streams", lambda state: bool(state.streaming), stream_new_tokens, max_steps_deferred=4),
            DeferredTask("grouping", _groups_are_old, regroup, max_steps_deferred=8),
            DeferredTask("length predictor", forecast_is_old, update_forecast, max_steps_deferred=16),
        ]

    def step(
        self,
        messages: Iterable[GenerateRequest | CancelRequest],
        results: Iterable[ForwardOutput],
    ) -> None:
        """Do everything that can be done now, and add finished sequences and streamed tokens to `state.deltas`."""
        state, timers = self.state, self.timers
        with timers.section("requests"):
            for message in messages:
                if isinstance(message, GenerateRequest):
                    add_request(state, message)
                else:
                    cancel_request(state, message.request_id)
        with timers.section("results"):
            for result in results:
                apply_output(state, result)
                self._step_began_s = time.perf_counter()
            if state.grammars is not None:
                state.grammars.read(min(MOST_READING_SECONDS, self._seconds_left() / 4))
                if state.grammars.has_finished:
                    apply_grammars(state)
            note_ends(state)
        if self._seconds_left() <= sum(task.seconds for task in self.tasks if task.has_work(state)):
            self._fill_worker_queue()
        for task in self.tasks:
            self._consider(task)
        self._fill_worker_queue()

    def _consider(self, task: DeferredTask) -> None:
        """Run `task` or defer it. Never deferred while the worker has no step: deferring would then gain nothing."""
        state = self.state
        if not task.has_work(state):
            task.num_steps_deferred = 0
            return
        if may_run(task, self._seconds_left(), state.options.deferred_tasks) or not state.steps_in_flight:
            start_s = time.perf_counter()
            with self.timers.section(task.name):
                task.run(state)
            task.note_run(time.perf_counter() - start_s)
        else:
            task.num_steps_deferred += 1

    def _seconds_left(self) -> float:
        """Estimated time that the worker needs for the steps in flight, in seconds."""
        state = self.state
        seconds = len(state.steps_in_flight) * (state.step_seconds or 0.0)
        return max(0.0, seconds - (time.perf_counter() - self._step_began_s))

    def _fill_worker_queue(self) -> None:
        """Send steps until the worker has as many as it should, or nothing is left to compute."""
        state = self.state
        num_steps = num_steps_to_keep_in_flight(state.step_seconds, state.options.max_steps_ahead)
        with self.timers.section("steps"):
            while len(state.steps_in_flight) < num_steps and (message := next_step(state)) is not None:
                if len(state.steps_in_flight) == 1:
                    self._step_began_s = time.perf_counter()
                with self.timers.section("sending"):
                    self._send(message)


def _groups_are_old(state: EngineState) -> bool:
    return state.groups_are_old and state.options.hydragen is not None


def regroup(state: EngineState) -> None:
    """Find the prefix groups: decoding sequences that attend to a shared prefix together."""
    options, slots, tree = state.options.hydragen, state.slots, state.blocks.tree
    assert options is not None
    decode = state.queues.decoding()
    grouping = group_by_prefix(
        *(slots.nodes[decode], tree.parents, tree.end_blocks, tree.num_sequences),
        *(options.min_group_size, options.min_blocks),
    )
    slots.groups[decode] = grouping.group_of_sequence
    state.group_num_blocks = grouping.num_blocks
    state.groups_are_old, state.groups_are_new = False, True


def next_step(state: EngineState) -> ForwardInput | None:
    """Schedule the next step and build its message; None if there is nothing to compute.

    Decoding sequences come first, because each keeps its blocks until it ends. Prompts share the remaining tokens.
    """
    ready = ready_to_decode(state)
    if num_blocks_short(state, ready) > 0:
        check_stop_strings(state)  # before preemption makes sampled tokens part of the prompt
        ready = make_room(state)
    if state.starts_are_stale:
        find_starts(state)
    num_decoding = len(ready)
    chunks: list[int] = []
    if state.queues.prefilling:
        budget = state.options.max_tokens_per_forward - num_decoding
        rate = state.prefill_rate
        slots = state.slots
        num_left = (
            len(sequence.prompt) - int(slots.num_kv_tokens[sequence.slot]) for sequence in state.queues.prefilling
        )
        chunks = split_prefill(num_left, budget if rate is None else min(budget, rate))
    if not chunks and (not num_decoding or is_better_later(state, ready)):
        return None
    return start_step(state, ready, chunks)


def make_room(state: EngineState) -> NDArray[np.int64]:
    """Preempt the sequences that lose least, until every remaining decoding sequence can get the block it needs.

    Returns the slots that are then ready to decode, as `ready_to_decode` does.
    """
    while (num_short := num_blocks_short(state, ready := ready_to_decode(state))) > 0:
        victims = _victims(state, num_short)
        assert victims, f"{num_short} blocks short, and no sequence to preempt"
        for sequence in victims:
            preempt(state, sequence)
    return ready


def _victims(state: EngineState, num_short: int) -> list[Sequence]:
    """Running sequences to preempt when `num_short` blocks are missing; empty if none can be preempted."""
    arrays, tree, page_size = state.slots, state.blocks.tree, state.options.limits.page_size
    slots = np.flatnonzero(arrays.is_running)
    shared = find_shared_blocks(
        arrays.nodes[slots], np.zeros(len(slots), np.int64), tree.parents, tree.end_blocks, tree.num_sequences
    ).num_shared_blocks
    is_open = arrays.opened_at[slots] <= state.next_step_id
    num_lost = np.where(is_open, np.maximum(0, arrays.num_kv_tokens[slots] - shared * page_size), 0)
    num_freed = arrays.num_covered_tokens[slots] // page_size - shared
    needs_block = arrays.is_decoding[slots] & (arrays.num_kv_tokens[slots] == arrays.num_covered_tokens[slots])
    num_freed += needs_block & ~arrays.awaits_matcher[slots]
    sequences = [state.sequences[slot] for slot in slots.tolist()]
    num_freed[[sequence is None or sequence.phase is Phase.DRAINING for sequence in sequences]] = 0
    is_being_read = arrays.awaits_matcher[slots] & (arrays.num_known_tokens[slots] > arrays.num_kv_tokens[slots])
    num_freed[is_being_read] = 0
    victims = choose_victims(num_lost, num_freed, arrays.admitted_at[slots], num_short)
    return [sequence for victim in victims.tolist() if (sequence := sequences[victim]) is not None]
