"""Samples of the engine for those who watch it: what runs, the KV forecast, and why the next sequence waits.

Nothing here runs unless the server has asked for a sample, which it does about once a second while somebody watches.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.admission import Candidates, describe, max_admitted_blocks, num_certain_to_fit
from tokasaurus.manager.engine.kv_forecast import KVForecast, expected_decode_steps, forecast_kv, running_slots
from tokasaurus.manager.engine.work_left import engine_time_left, oldest_wait, round_seconds
from tokasaurus.manager.planning.kv_simulation import SequenceLoads, SharedLoads, simulate_kv
from tokasaurus.manager.planning.live_forecast import curve_points, first_fitting_step
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Phase, Samples
from tokasaurus.messages.live import (
    MAX_FORECAST_POINTS,
    MAX_OLD_REQUESTS,
    Blocked,
    ClientCounts,
    LiveBlocks,
    LiveEvents,
    LiveForecast,
    LiveNext,
    LiveOldRequest,
    LiveSample,
    LiveStage,
)
from tokasaurus.messages.stages import StageBoard, StageTotals
from tokasaurus.messages.status import EngineStats

Int64Array = NDArray[np.int64]

MAX_WAIT_SECONDS = 0.2
"""Longest time for which a sample is put off because the worker needs steps first."""

NEW_SECONDS_WEIGHT = 0.2
"""Weight of the newest sample in the moving average of the time that one takes."""

MAX_LOOKED_AT = 4096
"""Unfinished requests among which the oldest are sought: while none runs, hundreds of thousands may wait."""

_NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Totals:
    """What samples tell the growth of."""

    num_steps: int = 0
    num_admitted: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    num_evicted_blocks: int = 0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    phase_seconds: tuple[float, ...] = ()
    manager_seconds: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[StageTotals, ...] = ()

    def since(self, before: "_Totals") -> "_Totals":
        """The growth from `before` to this."""
        phases = self.phase_seconds
        if before.phase_seconds:
            phases = tuple(new - old for old, new in zip(before.phase_seconds, phases, strict=True))
        stages = self.stages
        if before.stages:
            stages = tuple(new.since(old) for old, new in zip(before.stages, stages, strict=True))
        return _Totals(
            num_steps=self.num_steps - before.num_steps,
            num_admitted=self.num_admitted - before.num_admitted,
            num_finished=self.num_finished - before.num_finished,
            num_preempted=self.num_preempted - before.num_preempted,
            num_evicted_blocks=self.num_evicted_blocks - before.num_evicted_blocks,
            busy_seconds=self.busy_seconds - before.busy_seconds,
            idle_seconds=self.idle_seconds - before.idle_seconds,
            phase_seconds=phases,
            manager_seconds={
                name: total - before.manager_seconds.get(name, 0.0) for name, total in self.manager_seconds.items()
            },
            stages=stages,
        )


class LiveSampler:
    """Takes the samples of one engine, and remembers the previous one."""

    def __init__(self, stages: StageBoard | None = None) -> None:
        """stages: what the pipeline stages count; None if there is only one."""
        self._stages = stages
        self.num_taken = 0
        """Samples since the start."""
        self._before = _Totals()
        self._seconds = 0.0
        """Moving average of the time that a sample takes."""
        self._asked_s: float | None = None
        """When the sample that is asked for was seen first; None if none is."""

    def is_due(self, state: EngineState, seconds_left: float, now_s: float) -> bool:
        """Whether to take the sample that is asked for now. seconds_left: until the worker needs another step."""
        if self._asked_s is None:
            self._asked_s = now_s
        is_late = now_s - self._asked_s >= MAX_WAIT_SECONDS
        return not state.steps_in_flight or is_late or 2 * self._seconds < seconds_left

    def take(self, state: EngineState, stats: EngineStats, manager_seconds: Mapping[str, float]) -> LiveSample:
        """Answers state.asked_sample. stats: of this moment. manager_seconds: by part of the step, since the start."""
        started_s = time.monotonic()
        assert state.asked_sample is not None, "no sample is asked for"
        stages = () if self._stages is None else self._stages.look()
        totals = _totals(state, manager_seconds, stages)
        growth = totals.since(totals if state.asked_sample.begins else self._before)
        kv_forecast = forecast_kv(state, state.admission.prefill_rate)
        sample = LiveSample(
            stats=stats,
            step=state.last_result_id,
            num_steps=growth.num_steps,
            round_seconds=round_seconds(state),
            num_microbatches=state.options.num_microbatches,
            num_slots=state.options.num_slots,
            num_prefilling=len(state.queues.prefilling),
            blocks=block_use(state),
            events=LiveEvents(
                growth.num_admitted, growth.num_finished, growth.num_preempted, growth.num_evicted_blocks
            ),
            forecast=_points(state, kv_forecast) if state.slots.num_running else None,
            next=_next_sequence(state, kv_forecast, started_s),
            oldest_wait_s=oldest_wait(state, started_s),
            lengths=list(state.lengths.newest),
            time_left=engine_time_left(state),
            manager_seconds=growth.manager_seconds,
            busy_seconds=growth.busy_seconds,
            idle_seconds=growth.idle_seconds,
            phase_seconds=growth.phase_seconds,
            stages=_stage_samples(state, stages, growth.stages),
            oldest=_oldest_requests(state, started_s),
            clients=_clients(state) if state.asked_sample.counts_clients else (),
        )
        state.lengths.newest.clear()
        state.asked_sample = self._asked_s = None
        self._before = totals
        self.num_taken += 1
        self._seconds += NEW_SECONDS_WEIGHT * (time.monotonic() - started_s - self._seconds)
        return sample


def _totals(state: EngineState, manager_seconds: Mapping[str, float], stages: tuple[StageTotals, ...]) -> _Totals:
    return _Totals(
        num_steps=state.step_totals.num_steps,
        num_admitted=state.slots.num_admissions,
        num_finished=state.totals.finished_sequences,
        num_preempted=state.totals.preemptions,
        num_evicted_blocks=state.blocks.tree.num_evicted_blocks,
        busy_seconds=state.step_totals.busy_seconds,
        idle_seconds=state.step_totals.idle_seconds,
        phase_seconds=state.totals.phase_seconds,
        manager_seconds=manager_seconds,
        stages=stages,
    )


def _stage_samples(
    state: EngineState, totals: Sequence[StageTotals], growth: Sequence[StageTotals]
) -> tuple[LiveStage, ...]:
    """totals: since the start. growth: since the previous sample."""
    samples = []
    num_before = state.next_step_id
    for now, new in zip(totals, growth, strict=True):
        # A device that has no further step does not say that it has finished the last one.
        num_microbatches = max(0, num_before - now.num_steps) if state.steps_in_flight else 0
        samples.append(LiveStage(round(new.busy_seconds, 6), round(new.waiting_seconds, 6), num_microbatches))
        num_before = now.num_steps
    return tuple(samples)


def block_use(state: EngineState) -> LiveBlocks:
    """The blocks of the pool by who uses them."""
    tree, num_free = state.blocks.tree, state.blocks.num_free
    nodes = np.flatnonzero(tree.arrays.num_sequences > 1)[1:]  # without the root, which is always among them
    end_blocks = tree.arrays.end_blocks
    num_shared = int((end_blocks[nodes] - end_blocks[tree.arrays.parents[nodes]]).sum())
    total, num_cached = state.blocks.num_blocks, tree.num_unused_blocks
    return LiveBlocks(total, total - num_free - num_cached - num_shared, num_shared, num_cached, num_free)


def _oldest_requests(state: EngineState, now_s: float) -> tuple[LiveOldRequest, ...]:
    """See LiveSample.oldest. now_s: by time.monotonic."""
    running: list[LiveOldRequest] = []
    waiting: list[LiveOldRequest] = []
    for samples in islice(state.unfinished.values(), MAX_LOOKED_AT):  # in the order of their arrival
        if len(running) == len(waiting) == MAX_OLD_REQUESTS:
            break
        is_waiting = all(sequence.phase is Phase.WAITING for sequence in samples.sequences)
        found = waiting if is_waiting else running
        if len(found) < MAX_OLD_REQUESTS and not samples.is_cancelled:
            found.append(_old_request(state, samples, now_s))
    return (*running, *waiting)


def _old_request(state: EngineState, samples: Samples, now_s: float) -> LiveOldRequest:
    request, arrays = samples.request, state.slots
    active = [sequence for sequence in samples.sequences if sequence.phase is not Phase.WAITING]
    slots = np.array([sequence.slot for sequence in active], np.int64)
    num_generated = int(np.maximum(0, arrays.num_known_tokens[slots] - arrays.num_prompt_tokens[slots]).sum())
    for sequence in samples.sequences:
        if sequence.phase is Phase.WAITING:  # after a preemption
            num_generated += len(sequence.kept_token_ids)
    is_prefilling = all(sequence.phase is Phase.PREFILL for sequence in active)
    admitted_s = min((sequence.admitted_s for sequence in samples.sequences if sequence.admitted_s), default=now_s)
    return LiveOldRequest(
        id=request.request_id,
        client=request.client,
        state=("prefilling" if is_prefilling else "running") if active else "waiting",
        samples=request.num_sequences,
        running=len(active),
        prompt_tokens=len(request.prompt_ids),
        generated_tokens=num_generated,
        max_tokens=request.max_new_tokens,
        age_seconds=round(max(0.0, now_s - samples.added_s), 3),
        wait_seconds=round(max(0.0, admitted_s - samples.added_s), 3),
    )


def _clients(state: EngineState) -> tuple[ClientCounts, ...]:
    """See LiveSample.clients."""
    running = Counter(sequence.request.client for sequence in state.slots.sequences if sequence is not None)
    waiting = state.queues.num_waiting_by_client()
    return tuple(ClientCounts(client, running[client], waiting[client]) for client in running | waiting)


def _points(state: EngineState, kv_forecast: KVForecast) -> LiveForecast:
    steps, blocks = curve_points(kv_forecast.curve, MAX_FORECAST_POINTS)
    return LiveForecast(
        step=state.next_step_id,
        steps=steps.tolist(),
        blocks=blocks.tolist(),
        peak=kv_forecast.curve.peak,
        limit=max_admitted_blocks(state),
    )


def _next_sequence(state: EngineState, kv_forecast: KVForecast, now_s: float) -> LiveNext | None:
    """The first waiting sequence, and what it waits for. now_s: by time.monotonic."""
    sequences = state.queues.first_waiting(1)
    if not sequences:
        return None
    candidates = describe(state, sequences)
    own, shared = _blocks_of_first(candidates, kv_forecast)
    fits_in_steps = _first_fitting_step(state, candidates, kv_forecast, own, shared)
    blocked_by: Blocked | None = None
    if state.is_paused:
        blocked_by = "paused"
    elif not state.slots.free:
        blocked_by = "slots"
    elif fits_in_steps != 0:
        blocked_by = "blocks"
    return LiveNext(
        fits_in_steps=fits_in_steps,
        blocks=int(own[-1] + shared.num_blocks[shared.last_steps < 0].sum()),
        prompt_tokens=int(candidates.num_prompt_tokens[0]),
        wait_seconds=round(max(0.0, now_s - state.unfinished[sequences[0].request.request_id].added_s), 3),
        blocked_by=blocked_by,
    )


def _blocks_of_first(candidates: Candidates, kv_forecast: KVForecast) -> tuple[Int64Array, SharedLoads]:
    """Blocks that the first candidate uses alone, by the step after its admission, until they are freed; and those of
    its prompt that it shares with others, whose last_steps are those of the running sequences that use them (-1: none
    does)."""
    page_size, delay = candidates.page_size, kv_forecast.release_delay
    num_tokens, num_steps = candidates.num_prompt_tokens[:1], candidates.decode_steps[:1]
    num_own_tokens = num_tokens % page_size
    starts = kv_forecast.prefill.extend(candidates.num_to_compute[:1], num_steps).start_steps
    no_loads = SharedLoads(_NO_BLOCKS, _NO_BLOCKS, _NO_BLOCKS)
    curve = simulate_kv(SequenceLoads(num_own_tokens, starts, num_steps), no_loads, page_size, delay)
    own = curve.at(np.arange(int(starts[0] + num_steps[0]) + delay + 1))
    path = np.array(candidates.sample_groups[0].path, np.int64).reshape(-1, 2)
    nodes, num_blocks = path[:, 0], path[:, 1]
    last_steps = np.where(nodes > 0, kv_forecast.node_last_steps[np.maximum(nodes, 0)], -1)
    return own, SharedLoads(num_blocks, np.zeros_like(num_blocks), last_steps)


def _first_fitting_step(
    state: EngineState, candidates: Candidates, kv_forecast: KVForecast, own: Int64Array, shared: SharedLoads
) -> int | None:
    """See LiveNext.fits_in_steps. own, shared: as returned by `_blocks_of_first`."""
    limit = max_admitted_blocks(state)
    if not state.slots.num_running:
        return 0  # one always fits alone
    if not state.options.config.enable_precise_onboard:
        return 0 if state.slots.free and num_certain_to_fit(state, candidates, limit) else None
    curve = kv_forecast.curve
    used = curve.at(np.arange(int(curve.steps.max(initial=-1)) + 1))
    return first_fitting_step(
        *(used, own, shared.num_blocks, shared.last_steps, limit),
        earliest=0 if state.slots.free else _first_free_slot(state, kv_forecast),
    )


def _first_free_slot(state: EngineState, kv_forecast: KVForecast) -> int:
    """The step after which the first running sequence leaves its slot."""
    past, prefilling = running_slots(state)
    ends = np.concatenate(
        (expected_decode_steps(state, past), kv_forecast.prefill.start_steps + expected_decode_steps(state, prefilling))
    )
    return int(ends.min()) + kv_forecast.release_delay + 1
