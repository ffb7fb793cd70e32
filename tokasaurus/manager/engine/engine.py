"""One step of the manager: apply messages and results, run deferred tasks if there is time, send steps."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.admission import admit_waiting, can_admit
from tokasaurus.manager.engine.commands import forget_commands, note_done, run_commands
from tokasaurus.manager.engine.input_building import group_costs, num_blocks_short, start_step
from tokasaurus.manager.engine.kv_forecast import forecast_is_old, note_ends, prefill_time, update_forecast
from tokasaurus.manager.engine.lifecycle import find_starts, preempt
from tokasaurus.manager.engine.microbatches import max_prefill, next_microbatches, prefilling_of, slots_of
from tokasaurus.manager.engine.outputs import (
    apply_grammars,
    apply_output,
    check_stop_strings,
    release_all_ending,
    release_ending,
    stream_new_tokens,
)
from tokasaurus.manager.engine.requests import (
    add_request,
    cancel_request,
    end_all,
    queue_released,
    release_cancelled,
)
from tokasaurus.manager.planning.kv_simulation import find_shared_blocks
from tokasaurus.manager.planning.prefix_groups import group_by_prefix
from tokasaurus.manager.planning.step_budget import (
    SECONDS_QUEUED,
    choose_victims,
    split_prefill,
    wants_another_step,
)
from tokasaurus.manager.planning.step_times import NUM_FEATURES
from tokasaurus.manager.state.engine_state import DeferredTasks, EngineState
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.commands import CommandDone, EngineCommand, WorkerCommand
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.live import JobsLeft, TakeSample
from tokasaurus.monitoring.timing import SectionTimers
from tokasaurus.monitoring.trace import NO_TRACE, Trace

SECONDS_IN_HURRY = 0.01
"""If the worker's queue has less work than this, in seconds, steps are sent before all arrived results are applied."""

RESULTS_SECONDS = 0.02
"""Longest time that results lie in the channel so that one round applies several: as long as a stream's tokens wait."""

MIN_STEP_SECONDS = 0.005
"""With shorter steps, results do not lie there: a sequence that ends by itself would wait for many of them."""

SECONDS_RESERVED = 0.015
"""Results lie there only while the worker has work for longer than this, in seconds: a round, and a lost time slice."""

MAX_READING_SECONDS = 0.002
"""Longest time a step waits for grammar matchers to read tokens, in seconds."""

NEW_RUN_WEIGHT = 0.2
"""Weight of the newest run in the moving average of a deferred task's time."""


@dataclass(slots=True)
class DeferredTask:
    """Work that a step may leave for a later step."""

    name: str
    has_work: Callable[[EngineState], bool]
    """Whether there is anything to do."""
    run: Callable[[EngineState], None]
    max_steps_deferred: int
    """Most consecutive steps that may defer it."""
    seconds: float = 0.0
    """Moving average of its running time."""
    num_steps_deferred: int = 0
    """Steps that have deferred it since it last ran."""

    def note_run(self, seconds: float) -> None:
        self.seconds += NEW_RUN_WEIGHT * (seconds - self.seconds)
        self.num_steps_deferred = 0


def may_run(task: DeferredTask, seconds_left: float, deferred_tasks: DeferredTasks | None) -> bool:
    """Whether to run `task` now rather than defer it.

    seconds_left: how long the worker is busy with the steps it has. deferred_tasks: see DeferredTasks; with None, the
    task is deferred while it is expected to take half of seconds_left or more.
    """
    if deferred_tasks == "always" or task.num_steps_deferred >= task.max_steps_deferred:
        return True
    return deferred_tasks is None and 2 * task.seconds < seconds_left


class Engine:
    """Schedules one engine. Calls `send` with each step for the worker, `send_command` with what comes between.

    tasks: the deferred tasks, most urgent first. timers: seconds spent in each part of `step`.
    """

    def __init__(
        self,
        state: EngineState,
        send: Callable[[ForwardInput], None],
        trace: Trace = NO_TRACE,
        send_command: Callable[[WorkerCommand], None] | None = None,
    ) -> None:
        self.state = state
        self.timers = SectionTimers(None if trace is NO_TRACE else trace.add_part)
        self.seconds_per_message = 0.0
        """Time to handle a request or cancellation, mean over the latest step with any."""
        self._send = send
        self._send_command = send_command
        self._step_began_s = 0.0  # estimate for the oldest step in flight
        self._looked_s = 0.0  # when results were last taken from the channel
        self._num_applied = 0  # results applied in this round
        self._num_unapplied = 0  # results that have arrived for the oldest steps in flight, but are not applied yet
        self.tasks = [
            DeferredTask("admission", can_admit, admit_waiting, max_steps_deferred=4),
            DeferredTask("stop strings", lambda state: state.has_uncounted, check_stop_strings, max_steps_deferred=8),
            DeferredTask("streams", _has_streams, stream_new_tokens, max_steps_deferred=4),
            DeferredTask("grouping", _groups_are_old, regroup, max_steps_deferred=8),
            DeferredTask("length predictor", forecast_is_old, update_forecast, max_steps_deferred=16),
        ]

    def step(
        self,
        messages: Iterable[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand],
        results: Iterable[ForwardOutput | CommandDone],
    ) -> None:
        """Do everything that can be done now, and add finished sequences and streamed tokens to `state.deltas`."""
        state, timers = self.state, self.timers
        with timers.section("requests"):
            start_s, messages = time.monotonic(), list(messages)
            for message in messages:
                if isinstance(message, GenerateRequest):
                    add_request(state, message)
                elif isinstance(message, CancelRequest):
                    cancel_request(state, message.request_id)
                elif isinstance(message, TakeSample):
                    state.asked_sample = message
                elif isinstance(message, JobsLeft):
                    state.jobs_left = message.time_left
                else:
                    state.commands.append(message)
            if messages:
                self.seconds_per_message = (time.monotonic() - start_s) / len(messages)
            num_cancelled = release_cancelled(state)
        with timers.section("results"):
            steps = []
            for result in results:
                if isinstance(result, ForwardOutput):
                    steps.append(result)
                else:
                    note_done(state, result)
            self._apply(steps)
            release_ending(state, num_cancelled)
            if state.grammars is not None:
                state.grammars.read(min(MAX_READING_SECONDS, self.seconds_left() / 4))
                if state.grammars.has_finished:
                    apply_grammars(state)
            note_ends(state)
        if state.commands:
            with timers.section("commands"):
                run_commands(state, self._send_command)
        queue_released(state)
        if self.seconds_left() <= sum(task.seconds for task in self.tasks if task.has_work(state)):
            self._fill_worker_queue()
        for task in self.tasks:
            self._consider(task)
        self._fill_worker_queue()
        if state.slots.num_running == 0 and state.queues.num_waiting == 0:
            state.has_had_work = False

    def forget_server(self) -> None:
        """The server has died: end all that it asked for, and free what that used. Cached prefixes stay."""
        end_all(self.state)
        forget_commands(self.state)
        self.state.asked_sample = self.state.jobs_left = None

    def _apply(self, results: list[ForwardOutput]) -> None:
        """Apply results, and send steps in between while the worker may run out of them.

        Many results have arrived if the previous round took long. Then the worker has few steps left.
        """
        now_s = time.monotonic()
        self._num_applied = self._num_unapplied = len(results)
        for result in results:
            apply_output(self.state, result)
            self._note_end(result, now_s)
            self._num_unapplied -= 1
            if self._num_unapplied:
                self._fill_worker_queue(SECONDS_IN_HURRY)
        self._looked_s = now_s

    def _consider(self, task: DeferredTask) -> None:
        """Run `task` or defer it. Never deferred while the worker has no step: deferring would then gain nothing."""
        state = self.state
        if not task.has_work(state):
            task.num_steps_deferred = 0
            return
        if may_run(task, self.seconds_left(), state.options.deferred_tasks) or not state.steps_in_flight:
            start_s = time.monotonic()
            with self.timers.section(task.name):
                task.run(state)
            task.note_run(time.monotonic() - start_s)
        else:
            task.num_steps_deferred += max(1, self._num_applied)

    def _note_end(self, result: ForwardOutput, now_s: float) -> None:
        """Estimate when the worker began its next step: when `result` was ready.

        It was busy with the result's step for `forward_seconds`, and the result arrived after the previous look.
        """
        self._step_began_s = min(now_s, max(self._looked_s, self._step_began_s + result.forward_seconds))

    def seconds_left(self) -> float:
        """Estimated time until the worker needs another step, in seconds.

        The first pipeline stage is one step ahead of the last for each stage between them. While too few sequences run
        to fill all stages, no other step can be sent before the next result.
        """
        state, num_ahead = self.state, self.state.options.config.pp_size - 1
        elapsed_s = time.monotonic() - self._step_began_s
        # Results that arrive during a round are read after it: meanwhile the worker may go on to later steps.
        start = self._num_unapplied
        seconds = state.step_time_model.predict(self._features(start + num_ahead))
        if num_ahead:
            seconds = max(seconds, state.step_time_model.predict(self._features(start, start + 1)))
        return max(0.0, seconds - elapsed_s)

    def seconds_results_may_wait(self) -> float:
        """How long results may lie in the channel, in seconds; 0 if something waits for the next one.

        A round costs a process that has slept several times what it costs one that goes on, so two results in one round
        take little more than half of the time of two rounds.
        """
        state = self.state
        slots, queues = state.slots, state.queues
        num_ending = slots.num_running - len(queues.decoding()) - len(queues.prefilling)
        if num_ending or queues.num_waiting or slots.num_with_masks or state.options.num_microbatches > 1:
            return 0.0
        if state.commands or state.sent_command is not None or any(step.begins for step in state.steps_in_flight):
            return 0.0
        if state.step_time_model.predict(self._features(0, 1)) < MIN_STEP_SECONDS:
            return 0.0
        return max(0.0, min(RESULTS_SECONDS, self.seconds_left() - SECONDS_RESERVED))

    def _features(self, start: int, end: int | None = None) -> NDArray[np.float64]:
        """Sum of the features of the steps in flight from number `start` up to `end`."""
        features = np.zeros(NUM_FEATURES)
        for step in itertools.islice(self.state.steps_in_flight, start, end):
            features += step.features
        return features

    def _wants_step(self, seconds_wanted: float) -> bool:
        state = self.state
        num_in_flight = len(state.steps_in_flight) - self._num_unapplied
        if state.options.num_microbatches > 1:
            return num_in_flight < state.options.num_microbatches
        queued, model = self._features(self._num_unapplied + 1), state.step_time_model
        seconds_queued = model.predict(queued) if model.knows(queued) else None
        return wants_another_step(
            num_in_flight, seconds_queued, seconds_wanted, state.options.config.scheduling_steps_ahead
        )

    def _fill_worker_queue(self, seconds_wanted: float = SECONDS_QUEUED) -> None:
        """Send steps until the worker has `seconds_wanted` of work in its queue, or nothing is left to compute."""
        state = self.state
        if state.is_paused:
            return
        with self.timers.section("steps"):
            while self._wants_step(seconds_wanted):
                if self._num_unapplied and num_blocks_short(state, ready_to_decode(state)) > 0:
                    return  # results that have arrived may free blocks: preempt nothing yet
                message = next_step(state, self._num_unapplied)
                if message is None:
                    return
                if len(state.steps_in_flight) - self._num_unapplied == 1:
                    self._step_began_s = time.monotonic()
                with self.timers.section("sending"):
                    self._send(message)


def ready_to_decode(state: EngineState) -> NDArray[np.int64]:
    """Decoding slots whose next token can be sampled, in queue order. The caller must not modify the array.

    A sequence with a grammar awaits its matcher, and cannot decode, from the step that samples its next token until the
    matcher has read that token. One whose token filter depends on its tokens awaits the step's result.
    """
    decoding = state.queues.decoding()
    if not state.slots.num_with_masks:
        return decoding
    return decoding[~state.slots.awaits_matcher[decoding]]


def _has_streams(state: EngineState) -> bool:
    return state.slots.num_streamed > 0


def _groups_are_old(state: EngineState) -> bool:
    return state.groups.are_old and state.options.hydragen is not None


def regroup(state: EngineState) -> None:
    """Find the prefix groups: decoding sequences that attend to a shared prefix together."""
    options, slots = state.options.hydragen, state.slots
    assert options is not None
    decode = state.queues.decoding()
    num_blocks = [np.zeros(1, np.int64)]
    num_groups = 0
    for microbatch in range(state.options.num_microbatches):  # only sequences that step together attend together
        own = slots_of(state, microbatch, decode)
        grouping = group_by_prefix(
            *(slots.nodes[own], state.blocks.tree.arrays, options.min_group_size, options.min_blocks),
            *(group_costs(state), state.options.limits.page_size),
        )
        groups = grouping.group_of_sequence
        slots.groups[own] = np.where(groups > 0, groups + num_groups, 0)
        num_blocks.append(grouping.num_blocks[1:])
        num_groups += len(grouping.num_blocks) - 1
    state.groups.num_blocks = np.concatenate(num_blocks)
    state.groups.are_old, state.groups.are_new = False, True


def next_step(state: EngineState, num_unapplied: int = 0) -> ForwardInput | None:
    """Schedule the next step and build its message; None if there is nothing to compute.

    num_unapplied: steps in flight whose results have arrived.
    """
    for microbatch in next_microbatches(state, num_unapplied):
        message = _step_of(state, microbatch)
        if message is not None:
            state.next_microbatch = (microbatch + 1) % state.options.num_microbatches
            return message
    return None


def _step_of(state: EngineState, microbatch: int) -> ForwardInput | None:
    """The next step of a microbatch; None if it has nothing to compute.

    Decoding sequences come first, because each keeps its blocks until it ends. Prompts share the remaining tokens, and
    the time that the step may take.
    """
    ready = slots_of(state, microbatch, ready_to_decode(state))
    if num_blocks_short(state, ready) > 0:
        release_all_ending(state)
        check_stop_strings(state)  # before preemption makes sampled tokens part of the prompt
        ready = make_room(state, microbatch)
    if state.starts_are_stale:
        find_starts(state)
    num_decoding = len(ready)
    chunks: list[int] = []
    if state.queues.prefilling:
        budget = state.options.config.max_tokens_per_forward - num_decoding
        if state.admission.prefill_rate is not None:
            budget = min(budget, -(-state.admission.prefill_rate // state.options.num_microbatches))
        if state.options.num_microbatches > 1:
            budget = min(budget, max_prefill(state, num_decoding))
        prompts = (
            (num_computed := int(state.slots.num_kv_tokens[sequence.slot]), len(sequence.prompt) - num_computed)
            for sequence in prefilling_of(state, microbatch)
        )
        chunks = split_prefill(prompts, budget, prefill_time(state, ready))
        if state.blocks.windows is not None:
            fitting = fit_windows(state, microbatch, ready, chunks)
            if fitting is None:
                return _step_of(state, microbatch)
            chunks = fitting
    if not chunks:
        decoding = slots_of(state, microbatch, state.queues.decoding())
        if not num_decoding or _is_better_later(state, ready, decoding):
            return None
    prefill = list(itertools.islice(prefilling_of(state, microbatch), len(chunks)))
    return start_step(state, microbatch, ready, prefill, chunks)


def _is_better_later(state: EngineState, ready: NDArray[np.int64], decoding: NDArray[np.int64]) -> bool:
    """Whether to delay a step in which only the slots `ready` decode, out of `decoding`, and wait for slots that await
    their matcher.

    Sequences with grammars cannot run ahead of their results, nor those with bad words of several tokens. If every
    ready sequence is such, decoding half of them in every other step would take twice the time of decoding all in each.
    If any is not, the step is sent now. No step waits for slow grammars, unless the grammars of all decoding sequences
    are slow.
    """
    if not state.slots.num_with_masks or not len(ready):
        return False
    slots = state.slots
    is_slow = slots.is_slow[decoding]
    is_worth_it = slots.awaits_matcher[decoding] & (~is_slow | is_slow.all())
    return bool(slots.needs_results[ready].all() and is_worth_it.any())


def make_room(state: EngineState, microbatch: int = 0) -> NDArray[np.int64]:
    """Preempt the sequences that lose least, until every remaining decoding sequence of the microbatch can get the
    block it needs.

    Returns the slots of the microbatch that are then ready to decode.
    """
    while (num_short := num_blocks_short(state, ready := slots_of(state, microbatch, ready_to_decode(state)))) > 0:
        victims = _victims(state, num_short)
        assert victims, f"{num_short} blocks short, and no sequence to preempt"
        for sequence in victims:
            preempt(state, sequence)
    return ready


def fit_windows(state: EngineState, microbatch: int, ready: NDArray[np.int64], chunks: list[int]) -> list[int] | None:
    """Cut the chunks of the next step's prompts so that layers with windows have blocks for their tokens, beside those
    that the slots `ready` need. None if nothing could go on, and a sequence has been preempted for the others."""
    windows, slots, page_size = state.blocks.windows, state.slots, state.options.limits.page_size
    assert windows is not None
    fitting: list[int] = []
    num_sets = -num_blocks_short(state, ready) // windows.groups.num_groups
    for sequence, num_tokens in zip(prefilling_of(state, microbatch), chunks, strict=False):
        start = int(slots.num_kv_tokens[sequence.slot])
        table = slots.block_tables[sequence.slot, start // page_size : -(-(start + num_tokens) // page_size)]
        lacking = np.flatnonzero(~windows.are_there(table))
        if len(lacking) > num_sets:
            num_tokens = int(lacking[num_sets]) * page_size - start % page_size
        if num_tokens > 0:
            fitting.append(num_tokens)
        num_sets -= len(lacking)
        if num_sets < 0:
            break
    if fitting or not chunks or len(ready) or state.steps_in_flight:
        return fitting
    if state.ending:
        release_all_ending(state)
        return None
    check_stop_strings(state)  # before preemption makes sampled tokens part of the prompt
    victims = _victims(state, windows.groups.num_groups - num_sets)
    for sequence in victims:
        preempt(state, sequence)
    return None if victims else fitting


def _victims(state: EngineState, num_short: int) -> list[Sequence]:
    """Running sequences to preempt when `num_short` blocks are missing; empty if none can be preempted."""
    arrays, page_size = state.slots, state.options.limits.page_size
    slots = np.flatnonzero(arrays.is_running)
    no_steps = np.zeros(len(slots), np.int64)
    shared = find_shared_blocks(arrays.nodes[slots], no_steps, state.blocks.tree.arrays).num_shared_blocks
    is_open = arrays.opened_at[slots] <= state.next_step_id
    num_kept = shared * page_size
    if (snapshots := state.blocks.snapshots) is not None:  # they would start from their newest one
        num_tokens = arrays.num_kv_tokens[slots].tolist()
        tables = arrays.block_tables[slots]
        num_kept = np.array([snapshots.start(*each) for each in zip(tables, num_tokens, strict=True)], np.int64)
    num_lost = np.where(is_open, np.maximum(0, arrays.num_kv_tokens[slots] - num_kept), 0)
    num_freed = arrays.num_covered_tokens[slots] // page_size - shared
    if state.blocks.windows is not None:
        num_computed = -(-arrays.num_kv_tokens[slots] // page_size)
        num_own = np.maximum(0, num_computed - np.maximum(arrays.first_held[slots], shared))
        num_freed += state.blocks.windows.groups.num_groups * num_own
    needs_block = arrays.is_decoding[slots] & (arrays.num_kv_tokens[slots] == arrays.num_covered_tokens[slots])
    num_freed += state.options.limits.blocks_per_page * (needs_block & ~arrays.awaits_matcher[slots])
    sequences = [arrays.sequence(slot) for slot in slots.tolist()]
    num_freed[[sequence.phase is Phase.DRAINING for sequence in sequences]] = 0
    num_freed[arrays.is_ending[slots]] = 0
    is_being_read = arrays.awaits_matcher[slots] & (arrays.num_known_tokens[slots] > arrays.num_kv_tokens[slots])
    num_freed[is_being_read] = 0
    victims = choose_victims(num_lost, num_freed, arrays.admitted_at[slots], num_short)
    return [sequences[victim] for victim in victims.tolist()]
