"""What GET /live sends and record=FILE keeps: one event a second, taken only while somebody listens or it is recorded.

docs/live.md describes each field. All listeners share the samples; one that reads slowly gets fewer of them. Who comes
gets the past as well, of which a little is kept all the time.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import orjson

from tokasaurus import __version__
from tokasaurus.messages.commands import adapter_version
from tokasaurus.messages.forward import FORWARD_PHASES
from tokasaurus.messages.live import (
    MAX_SAMPLE_LENGTHS,
    ClientCounts,
    LiveSample,
)
from tokasaurus.messages.status import EngineStats, TimeLeft
from tokasaurus.server.engine_client.client import CallCounts, EngineClient, WorkDone
from tokasaurus.server.engine_client.replicas import Replica
from tokasaurus.server.jobs.objects import seconds_of
from tokasaurus.server.jobs.open_bulk import MAX_ENDED, OpenBulk, OpenBulks
from tokasaurus.server.jobs.service import BatchService
from tokasaurus.server.jobs.store.data_dir import StoreError
from tokasaurus.server.jobs.store.records import BatchRecord
from tokasaurus.server.live_past import SECONDS_BETWEEN, LivePast
from tokasaurus.server.protocol.live import (
    FORMAT,
    JobState,
    LiveEvent,
    LiveJob,
    LiveKey,
    LiveMoment,
    LiveMomentBlocks,
    LiveMomentReplica,
    LiveParts,
    LiveReplica,
    LiveRequests,
    LiveServer,
    ReplicaState,
)
from tokasaurus.server.recording import Recording
from tokasaurus.server.state import ServerState
from tokasaurus.text.json_lines import write_json
from tokasaurus.workers import num_replicas, num_workers

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
MAX_SAMPLE_WAIT_SECONDS = 0.4
"""Longest time for which an event waits for the replicas' samples."""
LOOK_SECONDS = 0.1
"""How often it is looked whether the server stops."""
RECORDED_SECONDS = 60.0
"""How long a job is recorded after its end: twenty in each event would double the size of a recording."""
MAX_REASON_CHARS = 200
MAX_KEYS = 20
"""API keys in an event."""

_STATES: dict[str, JobState] = {
    "validating": "validating",
    "in_progress": "waiting",
    "finalizing": "finished",
    "completed": "finished",
    "failed": "failed",
    "expired": "failed",
    "cancelling": "cancelled",
    "cancelled": "cancelled",
}


@dataclass(slots=True, eq=False)
class _Listener:
    """Has the newest event that it was not sent yet; earlier ones are dropped."""

    event: bytes | None = None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class LiveFeed:
    """One per server. All methods run on the event loop's thread.

    batches: None if the server stores none. recording: None if nothing is recorded.
    """

    def __init__(
        self, state: ServerState, batches: BatchService | None, bulks: OpenBulks, recording: Recording | None
    ) -> None:
        self._state = state
        self._jobs = _Jobs(state, batches, bulks)
        self._recording = recording
        self._listeners: dict[_Listener, None] = {}
        self._has_listeners = asyncio.Event()
        self._has_ended = False
        self._past = LivePast()
        self._stats_of_past: dict[int, tuple[int, EngineStats]] = {}
        """(starts, statistics) of each replica at the newest moment of the past."""
        self._new_lengths: dict[int, deque[tuple[int, int]]] = {}
        """Of each replica, what events have told since that moment: a manager tells a length once."""
        self._clients: dict[int, Sequence[ClientCounts]] = {}
        """What each replica has told last."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send listeners events within the context."""
        tasks = [
            asyncio.create_task(self._run(), name="live feed"),
            asyncio.create_task(self._keep_past(), name="past of the live feed"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end()

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, until the server stops. The first has the past."""
        is_first = True
        with self._listening() as listener:
            while not self._has_ended:
                await listener.has_news.wait()
                listener.has_news.clear()
                event, listener.event = listener.event, None
                if event is not None:
                    yield b"data: %s\n\n" % (self._past.added_to(event, time.time()) if is_first else event)
                    is_first = False

    @contextmanager
    def _listening(self) -> Iterator[_Listener]:
        listener = _Listener()
        self._listeners[listener] = None
        self._has_listeners.set()
        try:
            yield listener
        finally:
            del self._listeners[listener]
            if not self._listeners:
                self._has_listeners.clear()

    async def _run(self) -> None:
        while True:
            if self._recording is None:
                await self._has_listeners.wait()
            await self._feed()

    async def _feed(self) -> None:
        """Events, as long as somebody wants them."""
        begins, due_s = True, time.monotonic()
        self._jobs.begin()
        while self._listeners or self._recording is not None:
            await self._try_to_send_event(begins)
            begins = False
            due_s = max(due_s + SAMPLE_SECONDS, time.monotonic())
            while (left_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, LOOK_SECONDS))
                if self._state.engine.is_draining and not self._state.engine.num_pending_requests:
                    if not self._has_ended:
                        await self._try_to_send_event(begins, ended=self._state.engine.why_stopping or None)
                    self._end()

    async def _keep_past(self) -> None:
        due_s = time.monotonic()
        while True:
            self._past.add(self._moment())
            due_s = max(due_s + SECONDS_BETWEEN, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    def _moment(self) -> LiveMoment:
        engine = self._state.engine
        replicas: list[LiveMomentReplica] = []
        for index, replica in enumerate(engine.replicas):
            moment: LiveMomentReplica = {
                "index": index,
                "state": _state_of(replica, engine),
                "restarts": max(0, replica.num_starts - 1),
            }
            stats = replica.stats
            if stats is not None:
                starts, before = self._stats_of_past.get(index, (0, stats))
                _add_stats(moment, stats)
                _add_past(moment, stats, before if starts == replica.num_starts else None)
                self._stats_of_past[index] = replica.num_starts, stats
            if lengths := self._new_lengths.pop(index, None):
                moment["lengths"] = list(lengths)
            replicas.append(moment)
        return {"time": round(time.time(), 3), "requests": self._requests(), "replicas": replicas}

    async def _try_to_send_event(self, begins: bool, ended: str | None = None) -> None:
        """ended: why the server ends, if this is the last event."""
        try:
            await self._send_event(begins, ended)
        except Exception:
            logger.exception("a sample of the live figures failed")

    async def _send_event(self, begins: bool, ended: str | None) -> None:
        await self._state.engine.ask_for_samples(begins, MAX_SAMPLE_WAIT_SECONDS)
        told = await self._event(ended)
        event = write_json(told)
        for listener in self._listeners:
            listener.event = event
            listener.has_news.set()
        if self._recording is not None:
            oldest = told["time"] - RECORDED_SECONDS
            jobs = [job for job in told["jobs"] if job["ended"] is None or job["ended"] > oldest]
            recorded: LiveEvent = {**told, "jobs": jobs}
            event = event if len(jobs) == len(told["jobs"]) else write_json(recorded)
            await asyncio.to_thread(self._recording.add, event)

    def _end(self) -> None:
        """Every listener's stream ends."""
        self._has_ended = True
        for listener in self._listeners:
            listener.has_news.set()

    async def _event(self, ended: str | None) -> LiveEvent:
        engine = self._state.engine
        for index, replica in enumerate(engine.replicas):
            if not replica.is_ready:
                self._clients.pop(index, None)
            elif replica.sample is not None:
                self._clients[index] = replica.sample.clients
                lengths = self._new_lengths.setdefault(index, deque(maxlen=MAX_SAMPLE_LENGTHS))
                lengths.extend(replica.sample.lengths)
        return {
            "format": FORMAT,
            "time": round(time.time(), 3),
            "server": self._server(ended),
            "requests": self._requests(),
            "replicas": [_replica(index, replica, engine) for index, replica in enumerate(engine.replicas)],
            "jobs": await self._jobs.describe(),
            "keys": _keys(engine.calls, chain.from_iterable(self._clients.values())),
        }

    def _requests(self) -> LiveRequests:
        calls = self._state.engine.calls
        return {
            "open": calls.num_open,
            "answered": calls.answered,
            "aborted": calls.aborted,
            "failed": calls.failed,
        }

    def _server(self, ended: str | None) -> LiveServer:
        state, config, limits = self._state, self._state.config, self._state.engine.limits
        return {
            "version": __version__,
            "model": state.model.name,
            "started": round(state.engine.started, 3),
            "dp_size": num_replicas(config),
            "pp_size": config.pp_size,
            "tp_size": config.tp_size,
            "device": config.device if limits is None else limits.device,
            "dtype": None if limits is None else limits.dtype,
            "page_size": None if limits is None else limits.page_size,
            "draining": state.engine.is_draining,
            "price_per_hour": config.price_per_hour,
            "ended": ended,
        }


def _keys(calls: CallCounts, clients: Iterable[ClientCounts]) -> list[LiveKey]:
    """See LiveEvent.keys. clients: of all replicas."""
    if not calls.tokens_by_key:
        return []
    keys = {name: _key(name, tokens) for name, tokens in calls.tokens_by_key.items()}
    prompt, generated = (sum(tokens[part] for tokens in calls.tokens_by_key.values()) for part in (0, 1))
    others = _key(None, (calls.num_prompt_tokens - prompt, calls.num_generated_tokens - generated))
    for counts in clients:
        key = keys.get(counts.client, others)
        key["running"] += counts.num_running
        key["waiting"] += counts.num_waiting
    # of equal ones in the order of their names
    order = sorted(keys.values(), key=lambda key: (-key["running"] - key["waiting"], -key["tokens"]["generated"]))
    for key in order[MAX_KEYS:]:
        others["running"] += key["running"]
        others["waiting"] += key["waiting"]
        others["tokens"]["prompt"] += key["tokens"]["prompt"]
        others["tokens"]["generated"] += key["tokens"]["generated"]
    return [*order[:MAX_KEYS], others]


def _key(name: str | None, tokens: tuple[int, int]) -> LiveKey:
    return {"name": name, "running": 0, "waiting": 0, "tokens": {"prompt": tokens[0], "generated": tokens[1]}}


def _replica(index: int, replica: Replica, engine: EngineClient) -> LiveReplica:
    """Takes the replica's sample, if one has arrived; without, what the server knows by itself."""
    shown: LiveReplica = {
        "index": index,
        "state": _state_of(replica, engine),
        "restarts": max(0, replica.num_starts - 1),
    }
    sample, replica.sample = replica.sample, None
    stats = replica.stats if sample is None else sample.stats
    if stats is not None:
        _add_stats(shown, stats)
        names = {one.digest: one.name for one in engine.control.adapters.named}
        if stats.adapters:
            loads = ((names.get(load.digest) or adapter_version("", load.digest), load) for load in stats.adapters)
            shown["adapters"] = {name: (load.num_running, load.num_held) for name, load in loads}
    if sample is not None:
        _add_sample(shown, sample)
    return shown


def _state_of(replica: Replica, engine: EngineClient) -> ReplicaState:
    if not replica.is_ready:
        return "starting" if replica.num_starts <= 1 and replica.limits is None else "down"
    if engine.control.is_asleep:
        return "asleep"
    return "paused" if engine.control.is_paused else "up"


def _add_stats(shown: LiveReplica | LiveMomentReplica, stats: EngineStats) -> None:
    shown["running"] = stats.num_running
    shown["background"] = stats.num_running_background
    shown["waiting"] = stats.num_waiting
    shown["queue_depth"] = stats.worker_queue_depth
    shown["tokens"] = {
        "prompt": stats.total_prompt_tokens,
        "generated": stats.total_generation_tokens,
        "cached": stats.total_prefix_cache_hit_tokens,
        "computed": stats.total_computed_prompt_tokens,
        "shared": stats.total_shared_prompt_tokens,
        "recomputed": stats.total_recomputed_tokens,
    }


def _add_past(shown: LiveMomentReplica, stats: EngineStats, before: EngineStats | None) -> None:
    """before: at the moment before; None if the replica has started since."""
    total, used, cached = stats.num_kv_blocks_total, stats.num_kv_blocks_used, stats.num_kv_blocks_cached
    shown["blocks"] = LiveMomentBlocks(total, used, cached, total - used - cached)
    preempted, evicted = stats.total_preemptions, stats.total_kv_blocks_evicted
    if before is not None:
        preempted, evicted = preempted - before.total_preemptions, evicted - before.total_kv_blocks_evicted
    shown["events"] = {"preempted": preempted, "evicted": evicted}


def _add_sample(shown: LiveReplica, sample: LiveSample) -> None:
    shown["step"], shown["steps"] = sample.step, sample.num_steps
    shown["step_seconds"] = _rounded(sample.round_seconds, 6)
    shown["microbatches"] = sample.num_microbatches
    shown["prefilling"], shown["slots"] = sample.num_prefilling, sample.num_slots
    shown["blocks"], shown["events"] = sample.blocks, sample.events
    shown["forecast"], shown["next"] = sample.forecast, sample.next
    shown["oldest_wait_seconds"] = _rounded(sample.oldest_wait_s, 3)
    shown["lengths"] = sample.lengths
    shown["eta_seconds"] = None if sample.time_left is None else round(sample.time_left.middle_s, 1)
    shown["eta_range"] = seconds_of(sample.time_left)
    shown["parts"] = _parts(sample)
    if sample.stages:
        shown["stages"] = list(sample.stages)
    shown["oldest"] = list(sample.oldest)


def _parts(sample: LiveSample) -> LiveParts:
    parts: LiveParts = {
        "manager": {name: round(seconds, 6) for name, seconds in sample.manager_seconds.items()},
        "device": {"busy": round(sample.busy_seconds, 6), "idle": round(sample.idle_seconds, 6)},
    }
    if sample.phase_seconds:
        phases = zip(FORWARD_PHASES, sample.phase_seconds, strict=False)
        parts["phases"] = {name: round(seconds, 6) for name, seconds in phases}
    return parts


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else round(value, num_digits)


@dataclass(frozen=True, slots=True)
class _Figures:
    """A job's, at one moment."""

    state: JobState
    num_lines: int | None
    num_completed: int = 0
    num_failed: int = 0
    num_running: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_second: float | None = None
    time_left: TimeLeft | None = None


def _bulk_figures(bulk: OpenBulk) -> _Figures:
    is_running, pace = bulk.state == "running", bulk.pace
    return _Figures(
        bulk.state,
        bulk.num_lines,
        bulk.num_completed,
        bulk.num_failed,
        bulk.num_read - bulk.num_completed - bulk.num_failed if is_running else 0,
        bulk.input_tokens,
        bulk.output_tokens + (pace.num_running_tokens if is_running else 0),
        pace.tokens_per_s() if is_running else None,
        pace.time_left if is_running else None,
    )


@dataclass(slots=True)
class _Job:
    """A job that is shown. Times of fields that end in `_s` are by time.monotonic."""

    id: str
    kind: Literal["batch", "bulk"]
    name: str
    started: float
    """Seconds since 1970."""
    work_before: WorkDone | None = None
    """Work that the server had done when the job's lines began to run; None before."""
    tokens_before: int = 0
    """Tokens of the job at that moment, computed by an earlier server."""
    device_seconds: float | None = 0.0
    """None if nobody watched it."""
    ended: float | None = None
    """Seconds since 1970."""
    reason: str | None = None
    """Why it failed, if a batch as a whole did."""
    last: _Figures | None = None


class _Jobs:
    """Jobs that run, and the newest MAX_ENDED that have ended, whether somebody watched them or not."""

    def __init__(self, state: ServerState, batches: BatchService | None, bulks: OpenBulks) -> None:
        self._state = state
        self._engine = state.engine
        self._batches = batches
        self._bulks = bulks
        self._jobs: dict[str, _Job] = {}
        self._open: dict[str, OpenBulk] = {}
        """Bulk requests that are shown as running."""

    def begin(self) -> None:
        """Nobody has watched for a while: speeds are not known."""
        self._jobs.clear()
        self._open.clear()

    async def describe(self) -> list[LiveJob]:
        await self._note_past()
        seen = self._note_bulks()
        if self._batches is not None:
            try:
                seen |= await self._note_batches(self._batches)
            except StoreError as error:
                logger.debug("batches are not shown: %s", error)
                seen |= {job.id for job in self._jobs.values() if job.kind == "batch"}
        for job in self._jobs.values():
            if job.id not in seen and job.ended is None:
                job.ended = time.time()
        ended = sorted((job for job in self._jobs.values() if job.ended is not None), key=_end_of, reverse=True)
        for job in ended[MAX_ENDED:]:
            del self._jobs[job.id]
        running = [job for job in self._jobs.values() if job.ended is None]
        return [self._describe(job) for job in [*running, *ended[:MAX_ENDED]]]

    async def _note_past(self) -> None:
        """Note what has ended while nobody watched, or between two events."""
        ends = sorted(job.ended for job in self._jobs.values() if job.ended is not None)
        since = ends[-MAX_ENDED] if len(ends) >= MAX_ENDED else 0.0
        for bulk in self._bulks.ended:
            if bulk.id in self._jobs or bulk.ended is None or bulk.ended <= since:
                continue
            job = _Job(bulk.id, "bulk", bulk.name, bulk.started, device_seconds=None, ended=bulk.ended)
            job.last = _bulk_figures(bulk)
            self._jobs[bulk.id] = job
        if self._batches is None:
            return
        try:
            for record in reversed(await self._batches.finished(MAX_ENDED)):
                if record.id in self._jobs or _end_of_batch(record) <= since:
                    continue
                job = await self._new_batch(self._batches, record)
                job.device_seconds, job.ended = None, _end_of_batch(record)
                job.last = self._batch_figures(job, self._batches, record)
        except StoreError as error:
            logger.debug("finished batches are not shown: %s", error)

    async def _new_batch(self, batches: BatchService, record: BatchRecord) -> _Job:
        """Raises StoreError."""
        name = _name_of(record) or await batches.name_of_input(record)
        job = self._jobs[record.id] = _Job(record.id, "batch", name, record.in_progress_at or record.created_at)
        return job

    def _note_bulks(self) -> set[str]:
        """Ids of the bulk requests that are open."""
        open_now = {bulk.id: bulk for bulk in self._bulks}
        for bulk in {**self._open, **open_now}.values():
            if bulk.id not in self._jobs:
                self._jobs[bulk.id] = _Job(bulk.id, "bulk", bulk.name, bulk.started, bulk.work_before)
            self._jobs[bulk.id].last = _bulk_figures(bulk)
        self._open = open_now
        return set(open_now)

    async def _note_batches(self, batches: BatchService) -> set[str]:
        """Ids of the batches that are not finished. Raises StoreError."""
        records = {record.id: record for record in await batches.unfinished()}
        seen = set(records)
        for job in self._jobs.values():
            if job.kind == "batch" and job.ended is None and job.id not in records:
                ended = await batches.find(job.id)
                if ended is not None:
                    records[job.id] = ended
        for record in records.values():
            job = self._jobs.get(record.id) or await self._new_batch(batches, record)
            job.last = self._batch_figures(job, batches, record)
        return seen

    def _batch_figures(self, job: _Job, batches: BatchService, record: BatchRecord) -> _Figures:
        running, progress = batches.running_batch(record), None
        job.reason = _reason_of(record)
        if running is not None:
            progress = batches.progress(record)
            job.work_before = running.work_before
            job.tokens_before = running.record.input_tokens + running.record.output_tokens
            job.started = record.in_progress_at or record.created_at
        return _Figures(
            _STATES[record.status] if running is None else "running",
            record.num_lines or None,  # 0 until it is validated
            record.num_completed,
            record.num_failed,
            0 if running is None else len(running.lines.lines),
            record.input_tokens,
            record.output_tokens if progress is None else progress.generated_tokens,
            None if running is None else running.pace.tokens_per_s(),
            None if running is None else running.pace.time_left,
        )

    def _describe(self, job: _Job) -> LiveJob:
        figures = job.last
        assert figures is not None, "it was noted when it was found"
        left = figures.time_left
        if job.work_before is not None and job.ended is None:
            job.device_seconds = self._device_seconds(job, figures)
        price_per_hour, config = self._state.config.price_per_hour, self._state.config
        num_devices = num_workers(config)
        device_seconds, price = job.device_seconds, None
        if price_per_hour is not None and device_seconds is not None:
            price = device_seconds / num_devices * price_per_hour / 3600
        return {
            "id": job.id,
            "kind": job.kind,
            "name": job.name,
            "state": figures.state,
            "lines": {
                "total": figures.num_lines,
                "done": figures.num_completed,
                "failed": figures.num_failed,
                "running": figures.num_running,
            },
            "tokens": {"prompt": figures.input_tokens, "generated": figures.generated_tokens},
            "started": round(job.started, 3),
            "tokens_per_second": round(figures.tokens_per_second or 0.0, 1),
            "eta_seconds": None if left is None else round(left.middle_s, 1),
            "eta_range": seconds_of(left),
            "cost": {"device_seconds": _rounded(device_seconds, 3), "price": _rounded(price, 6)},
            "ended": _rounded(job.ended, 3),
            "reason": job.reason,
        }

    def _device_seconds(self, job: _Job, figures: _Figures) -> float:
        """The job's share of the time in which the devices were busy since it began, by tokens."""
        assert job.work_before is not None
        work, config = self._engine.work_done, self._state.config
        num_tokens = work.num_tokens - job.work_before.num_tokens
        own = figures.input_tokens + figures.generated_tokens - job.tokens_before
        share = min(1.0, max(0, own) / num_tokens) if num_tokens > 0 else 0.0
        busy_seconds = work.busy_seconds - job.work_before.busy_seconds
        return max(0.0, busy_seconds) * share * config.pp_size * config.tp_size


def _end_of(job: _Job) -> float:
    assert job.ended is not None, "it has ended"
    return job.ended


def _end_of_batch(record: BatchRecord) -> float:
    """Seconds since 1970."""
    ends = (record.completed_at, record.failed_at, record.expired_at, record.cancelled_at)
    return next((end for end in ends if end is not None), record.created_at)


def _reason_of(record: BatchRecord) -> str | None:
    """Why the batch as a whole failed, in a line; None if it did not."""
    if record.status == "expired":
        return f"its completion window of {record.completion_window} has passed"
    errors = [] if record.errors is None else orjson.loads(record.errors)
    if not errors:
        return None
    place = f"line {errors[0]['line']}: " if errors[0].get("line") is not None else ""
    return f"{place}{errors[0].get('message')}"[:MAX_REASON_CHARS]


def _name_of(record: BatchRecord) -> str:
    """The batch's metadata.name; "" without one."""
    metadata = {} if record.metadata is None else orjson.loads(record.metadata)
    return str(metadata.get("name", ""))
