"""The server's end of the channels to the managers: submits requests, collects or streams their sequences, cancels."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import ChannelClosed, Receiver, receive_connection
from tokasaurus.messages.commands import (
    AbortRequests,
    Held,
)
from tokasaurus.messages.generation import (
    CancelRequest,
    EngineUpdate,
    GenerateRequest,
    SequenceDelta,
    TopLogprobs,
)
from tokasaurus.messages.live import JobsLeft, LiveSample, TakeSample
from tokasaurus.messages.status import (
    FIRST_SERVER,
    EngineLimits,
    EngineStats,
    Predecessors,
    Ready,
    ServerTotals,
    StepCost,
    TimeLeft,
)
from tokasaurus.monitoring.request_log import LoggedRequest
from tokasaurus.monitoring.request_metrics import EndReason, RequestMetrics
from tokasaurus.monitoring.request_spans import current_span
from tokasaurus.server.engine_client.adapters import adapter_named_by
from tokasaurus.server.engine_client.collectors import FinishedSequence, Results, StreamCollector
from tokasaurus.server.engine_client.commands import Commands, ReplicaLost
from tokasaurus.server.engine_client.control import CheckUpdate, EngineControl, states_alone
from tokasaurus.server.engine_client.limits import NO_LIMITS, QueueLimits, UnfinishedWork
from tokasaurus.server.engine_client.pending import Collector, JobPace, PendingRequest
from tokasaurus.server.engine_client.replicas import Replica, choose_replica
from tokasaurus.server.errors import EngineDied, EngineRestarting


@dataclass(slots=True)
class CallCounts:
    """What has become of the `generate` and `stream` calls since the start; each is a body that a route or a line of a
    job has sent. For the live page, and for the summary when the server ends."""

    num_open: int = 0
    answered: int = 0
    aborted: int = 0
    """The caller no longer waited, mostly because its client had disconnected."""
    failed: int = 0
    """The caller was told an error."""
    num_prompt_tokens: int = 0
    """Prompt tokens of calls that have ended; a prompt counts once, however many samples it has."""
    num_generated_tokens: int = 0
    """Generated tokens that came back for calls that have ended; at the server's end, all that were sampled."""
    tokens_by_key: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of both, the part of each API key, by the key's name; of other clients there are none."""
    num_kept_tokens: int = 0
    """Tokens of lines that the server's end has cut, with which its next start continues them."""
    num_lines_left: int = 0
    """Lines of batches that go on at the next start; known at the server's end."""

    def note_end(
        self,
        client: str,
        is_whole: bool,
        has_error: bool,
        error: BaseException | None,
        num_prompt: int,
        num_generated: int,
    ) -> None:
        """is_whole: all its sequences have finished. has_error: its caller was told an error. error: what has ended it.
        num_prompt, num_generated: its tokens."""
        self.num_open -= 1
        if client in self.tokens_by_key:
            prompt, generated = self.tokens_by_key[client]
            self.tokens_by_key[client] = (prompt + num_prompt, generated + num_generated)
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        is_given_up = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        if has_error or (error is not None and not is_given_up):
            self.failed += 1
        elif is_whole:
            self.answered += 1
        else:
            self.aborted += 1

    def note_sampled(self, num_tokens: int) -> None:
        """At the server's end: the engine has sampled so many tokens, for calls that got none of them, too."""
        self.num_generated_tokens = max(self.num_generated_tokens, num_tokens)

    def take_back(self, num_kept_tokens: int) -> None:
        """A call that counts as answered has been cut by the server's end: its line goes on at the next start, with
        so many tokens."""
        self.answered -= 1
        self.num_kept_tokens += num_kept_tokens

    def totals(self) -> ServerTotals:
        return ServerTotals(
            num_answered=self.answered,
            num_aborted=self.aborted,
            num_failed=self.failed,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_kept_tokens=self.num_kept_tokens,
            num_lines_left=self.num_lines_left,
        )


MIN_LOOK_SECONDS = 0.5
"""Shortest time between two looks at the paces of jobs: each replica reports once a second."""
MAX_LOOK_SECONDS = 0.02
"""Time after which no further job is looked at, which then comes first at the next look. One takes up to 10 ms."""

MAX_REPLAYS = 3
"""Most times that a request is submitted again. A request that makes the engine die must not do so for ever."""

MAX_AT_ONCE = 256
"""Requests of a body that are submitted or cancelled before other tasks of the event loop may run."""

MAX_RECEIVE_S = 0.005
"""Time for messages before other tasks of the event loop may run: more may arrive all the while. In seconds."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work of all replicas since the server's start, work of replicas that have died since included."""

    busy_seconds: float
    """See EngineStats.total_forward_seconds."""
    num_tokens: int
    """Prompt and generated tokens; a prompt counts once, however many samples it has."""

    def __add__(self, other: "WorkDone") -> "WorkDone":
        return WorkDone(self.busy_seconds + other.busy_seconds, self.num_tokens + other.num_tokens)


def _work_of(replica: Replica) -> WorkDone:
    stats = replica.stats
    if stats is None:
        return WorkDone(0.0, 0)
    return WorkDone(stats.total_forward_seconds, stats.total_prompt_tokens + stats.total_generation_tokens)


def _num_sampled_by(replica: Replica) -> int:
    """Tokens that it has sampled for this server."""
    if replica.stats is None or replica.num_sampled_before is None:
        return 0
    return replica.stats.total_generation_tokens - replica.num_sampled_before


def _raise(error: Exception) -> None:
    raise error


def _abort_without_tokens(request: GenerateRequest, sequence_index: int, version: str) -> SequenceDelta:
    """The only delta of a sequence that is aborted before a manager has it."""
    top = None
    if request.num_top_logprobs:
        shape = 0, request.num_top_logprobs
        top = TopLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    lacks_logprobs = request.want_prompt_logprobs and sequence_index == 0
    return SequenceDelta(
        request_id=request.request_id,
        sequence_index=sequence_index,
        token_ids=[],
        logprobs=[] if request.want_logprobs else None,
        finish_reason="abort",
        num_cached_tokens=0,
        num_computed_tokens=0,
        num_recomputed_tokens=0,
        num_shared_tokens=0,
        top=top,
        error="aborted before its prompt was computed" if lacks_logprobs else "",
        error_code="aborted" if lacks_logprobs else None,
        weight_versions=((0, version),),
    )


class EngineClient:
    """Submits requests to the replicas' managers and hands their deltas to the callers.

    One per server. All methods run on the event loop's thread.

    If a replica dies, its requests whose caller has received nothing are submitted again, to another replica or to the
    same one after its restart, with the same seeds; its other requests end with EngineDied.

    launcher: socket over which the launcher hands over the channels of each replica that it has started. on_ready:
    called once, when every replica is up. on_broken: called when a manager's message cannot be read or applied; answers
    are lost from then on. queue_limits: what may be unfinished. while_restarting: the flag.
    """

    def __init__(
        self,
        launcher: socket.socket,
        num_replicas: int = 1,
        on_ready: Callable[[], None] = lambda: None,
        on_broken: Callable[[Exception], None] = _raise,
        queue_limits: QueueLimits = NO_LIMITS,
        while_restarting: str = ServerConfig.while_restarting,
        check_update: CheckUpdate = states_alone,
        logged_model: str | None = None,
        predecessors: Predecessors = FIRST_SERVER,
        tell_held: Callable[[Held], None] = lambda _: None,
    ) -> None:
        """logged_model: the served name, if each request writes a line of the log at its end. predecessors: in whose
        place this server goes on. tell_held: called with each change of what holds beyond this server's death."""
        launcher.setblocking(False)
        self._launcher = launcher
        self._replicas = [Replica(index=index) for index in range(num_replicas)]
        for replica, before in zip(self._replicas, predecessors.replicas, strict=False):
            replica.limits, replica.num_starts = before
        self.num_server_restarts = predecessors.num_restarts
        self.started = predecessors.started or time.time()
        """When the server started, or the first one in whose place it goes on, in seconds since 1970."""
        self._has_been_up = False
        self.request_metrics = {str(index): RequestMetrics() for index in range(num_replicas)}
        """Metrics by replica; requests that ended before any replica had them count under ""."""
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._while_restarting = while_restarting
        self._pending: dict[str, PendingRequest] = {}
        self._work = UnfinishedWork(queue_limits)
        self._jobs: dict[str, JobPace] = {}
        """Paces of the jobs that run, the one that waits longest for a look first."""
        self._looked_s = 0.0
        """When the paces of the jobs were last looked at, by time.monotonic."""
        self._told_left: TimeLeft | None = None
        """What the managers know of the jobs."""
        self.calls = CallCounts()
        self._work_of_lost = WorkDone(0.0, 0)
        self._num_sampled_by_lost = 0
        self._commands = Commands(self._replicas)
        self.control = EngineControl(
            self._replicas, self._commands, self, predecessors, check_update, on_broken, tell_held
        )
        self._logged_model = logged_model
        self._has_sample = asyncio.Event()
        self.drain_begins = asyncio.Event()
        """Set once the server is stopping: requests in the engine continue, and no new ones are accepted."""
        self.why_stopping = ""
        """In a few words; empty if it is not stopping, or if nobody has said why."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive new connections and the managers' messages on the running event loop, within the context."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._launcher.fileno(), self._accept)
        # Before the first request, which may wait already if the server was started again.
        self._accept()
        for index, replica in enumerate(self._replicas):
            if replica.connection is not None:
                self._receive(index)
        try:
            yield
        finally:
            loop.remove_reader(self._launcher.fileno())
            self.calls.note_sampled(self._num_sampled_by_lost + sum(map(_num_sampled_by, self._replicas)))
            for replica in self._replicas:
                self._close(replica)

    @property
    def is_draining(self) -> bool:
        """The server is stopping."""
        return self.drain_begins.is_set()

    def begin_drain(self, why: str = "") -> None:
        """The server is stopping, from now on. why: in a few words; "" keeps what was said before."""
        self.why_stopping = why or self.why_stopping
        self.drain_begins.set()

    @property
    def limits(self) -> EngineLimits | None:
        """The limits of the replica with the shortest maximum sequence length; None until all replicas have been up."""
        known = [replica.limits for replica in self._replicas if replica.limits is not None]
        if len(known) < len(self._replicas):
            return None
        return min(known, key=lambda limits: limits.max_tokens_per_sequence)

    @property
    def is_restarting(self) -> bool:
        """All replicas have been up, and now none is."""
        return self.limits is not None and not any(replica.is_ready for replica in self._replicas)

    @property
    def _up(self) -> list[Replica]:
        return self._commands.up

    @property
    def stats(self) -> Sequence[EngineStats | None]:
        """The latest statistics of each replica; None for a replica that is not up."""
        return [replica.stats for replica in self._replicas]

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas, to be read only."""
        return self._replicas

    @property
    def work_done(self) -> WorkDone:
        return sum((_work_of(replica) for replica in self._replicas), self._work_of_lost)

    async def ask_for_samples(self, begins: bool, timeout_s: float) -> None:
        """Returns when `Replica.sample` is set of all replicas that are up, or after `timeout_s`. A later answer sets
        it too, and until then that replica is not asked again. begins: see TakeSample. Clients are counted if there are
        several API keys."""
        for replica in self._up:
            if begins:
                replica.sample = None  # it arrived when nobody watched any more
            if replica.sample is None and not replica.is_asked:
                replica.is_asked = True
                replica.send(TakeSample(begins, counts_clients=bool(self.calls.tokens_by_key)))
        deadline_s = time.monotonic() + timeout_s
        while any(replica.sample is None for replica in self._up) and (left_s := deadline_s - time.monotonic()) > 0:
            self._has_sample.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_sample.wait(), left_s)

    @property
    def num_unfinished_sequences(self) -> Sequence[int]:
        """Unfinished sequences of each replica, counted from when they are sent until their ends arrive.

        The managers' statistics count them later."""
        return [replica.num_unfinished_sequences for replica in self._replicas]

    @property
    def num_unsent_sequences(self) -> int:
        """Sequences of requests that wait for a replica, or for the end of a pause."""
        return sum(pending.num_unfinished for pending in self.unsent)

    @property
    def num_restarts(self) -> Sequence[int]:
        """How often each replica was started again."""
        return [max(0, replica.num_starts - 1) for replica in self._replicas]

    @property
    def switched_off(self) -> Sequence[Sequence[str]]:
        """Features that the checks of a replica's last start have switched off, for each replica."""
        return [() if replica.limits is None else replica.limits.switched_off for replica in self._replicas]

    @property
    def num_pending_requests(self) -> int:
        """Requests that a `generate` or `stream` call is waiting for or has not yet cleaned up."""
        return len(self._pending)

    @contextmanager
    def running_job(self, job: str, pace: JobPace) -> Iterator[None]:
        """Within the context, `pace` follows the requests of this job; see GenerateRequest."""
        self._jobs[job] = pace
        try:
            yield
        finally:
            del self._jobs[job]
            self._tell_jobs_left()

    def _look_at_jobs(self) -> None:
        """After reports of the managers."""
        now_s = time.monotonic()
        if now_s - self._looked_s < MIN_LOOK_SECONDS:
            return
        self._looked_s = now_s
        costs = [replica.step_cost for replica in self._up if replica.step_cost is not None] or [StepCost()]
        num = len(costs)  # each replica has a part of the rows
        cost = StepCost(
            sum(cost.per_step for cost in costs) / num,
            sum(cost.per_row for cost in costs) / num**2,
            sum(cost.per_prompt_token for cost in costs) / num**2,
        )
        for job, pace in list(self._jobs.items()):
            pace.look(now_s, cost)
            self._jobs[job] = self._jobs.pop(job)  # behind those that wait for their turn
            if time.monotonic() - now_s > MAX_LOOK_SECONDS:
                break
        self._tell_jobs_left()

    def _tell_jobs_left(self) -> None:
        """The managers' log lines have the same times as the jobs."""
        known = [pace.time_left for pace in self._jobs.values() if pace.time_left is not None]
        left = TimeLeft(*(max(ends) for ends in zip(*known, strict=True))) if known else None
        if left != self._told_left:
            self._told_left = left
            for replica in self._up:
                replica.send(JobsLeft(left))

    def check_queue(self, client: str, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises QueueFull or InvalidRequest if a body of `client` cannot be submitted, see UnfinishedWork.check."""
        up = [stats for stats in self.stats if stats is not None]
        num_running = sum(stats.num_running - stats.num_running_background for stats in up)
        self._work.check(client, num_sequences, num_tokens, num_running)

    def check_restart(self) -> None:
        """Raises EngineRestarting if new requests are refused now."""
        if self.is_restarting and self._while_restarting == "refuse":
            raise EngineRestarting("the engine is restarting")

    async def generate(
        self, requests: Sequence[GenerateRequest], max_values: int | None = None
    ) -> list[list[FinishedSequence]]:
        """The finished sequences of each request, in order of `sequence_index`.

        requests: at least one, each with a new request id. If the caller is cancelled, unfinished requests are
        cancelled at the managers. max_values: most tokens and logprobs of all sequences. Raises as `check_queue`, and
        EngineDied, AnswerTooLarge beyond max_values, and SequenceAborted as soon as one sequence is aborted.
        """
        results = Results(requests, max_values)
        async with self._submitted(requests, results):
            await results.finished
        return results.sequences

    @asynccontextmanager
    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[StreamCollector]:
        """Runs the requests within the context; their deltas are read from the collector.

        requests: at least one, each with a new request id, all `is_streamed`. At the end of the context, unfinished
        requests are cancelled at the managers. Raises as `check_queue`.
        """
        collector = StreamCollector(requests)
        async with self._submitted(requests, collector):
            yield collector

    @asynccontextmanager
    async def _submitted(self, requests: Sequence[GenerateRequest], collector: Collector) -> AsyncIterator[None]:
        """Runs the requests within the context, a part of them at a time. Raises as `check_queue`, and ModelNotFound if
        their adapter was unloaded long ago."""
        num_sequences = sum(request.num_sequences for request in requests)
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        if requests[0].is_background:
            self._work.check_size(num_sequences, num_tokens)
        else:
            self.check_queue(requests[0].client, num_sequences, num_tokens)
        self.control.adapters.begin_call(requests)
        if not requests[0].is_background:
            self._work.add(requests[0].client, len(requests), num_sequences, num_tokens)  # before other bodies' checks
        submitted: deque[PendingRequest] = deque()
        error: BaseException | None = None
        # A batch may have been created by the request of this context, and runs long after it.
        span = None if requests[0].is_background else current_span.get()
        self.calls.num_open += 1
        job = self._jobs.get(requests[0].job)
        if job is not None:
            job.begin_line()
        try:
            for index, request in enumerate(requests):
                logged = None if self._logged_model is None else LoggedRequest(request, self._name_in_log(request))
                submitted.append(PendingRequest(request, collector, index, span=span, logged=logged, job=job))
                if span is not None:
                    span.note_request(request)
                self._add(submitted[-1])
                if len(submitted) % MAX_AT_ONCE == 0:
                    await asyncio.sleep(0)
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if job is not None:
                job.end_line()
            self._note_call_end(requests, submitted, error)
            for request in requests[len(submitted) :]:
                self._work.remove(request, request.num_sequences)
                self._metrics_of(None).note_broken_request(request, request.num_sequences, "cancelled")
                if self._logged_model is not None:
                    LoggedRequest(request, self._name_in_log(request)).write(request.num_sequences, "cancelled", 0)
            self._remove_all(submitted, requests[0].adapter)

    def _name_in_log(self, request: GenerateRequest) -> str:
        """The name of the model, or of an adapter that the request has named."""
        assert self._logged_model is not None, "requests are logged"
        return adapter_named_by(request) or self._logged_model

    def _note_call_end(
        self, requests: Sequence[GenerateRequest], submitted: Collection[PendingRequest], error: BaseException | None
    ) -> None:
        """A call with these requests ends, by `error` if that is not None."""
        is_whole = len(submitted) == len(requests) and all(pending.num_unfinished == 0 for pending in submitted)
        self.calls.note_end(
            requests[0].client,
            is_whole,
            any(pending.has_error for pending in submitted),
            error,
            sum(len(pending.request.prompt_ids) for pending in submitted),
            sum(max(0, pending.num_received_tokens) for pending in submitted),
        )

    def _remove_all(self, submitted: deque[PendingRequest], adapter: str) -> None:
        """Remove the requests of a call, the first at once. Not with `await`, which a second cancellation would end.
        adapter: their adapter's digest."""
        for _ in range(min(MAX_AT_ONCE, len(submitted))):
            self._remove(submitted.popleft())
        if submitted:
            asyncio.get_running_loop().call_soon(self._remove_all, submitted, adapter)
        else:
            self.control.adapters.end_call(adapter)

    def _add(self, pending: PendingRequest) -> None:
        request_id = pending.request.request_id
        assert request_id not in self._pending, f"request id {request_id} used twice"
        self._pending[request_id] = pending
        if pending.job is not None:
            pending.job.add(pending, time.monotonic())
        self._submit(pending)

    def _remove(self, pending: PendingRequest) -> None:
        """The caller no longer waits: cancel what is not finished."""
        del self._pending[pending.request.request_id]
        if pending.job is not None:
            pending.job.remove(pending)
        self._work.remove(pending.request, pending.num_unfinished)
        replica = self._unassign(pending)
        reason: EndReason = "error" if pending.has_error else "cancelled"
        if pending.logged is not None:
            num_tokens = max(pending.num_received_tokens, pending.num_generated_tokens)
            pending.logged.write(pending.num_unfinished, reason, num_tokens)
        if pending.num_unfinished > 0:
            self._metrics_of(replica).note_broken_request(pending.request, pending.num_unfinished, reason)
            if replica is not None:
                replica.send(CancelRequest(pending.request.request_id))

    def _metrics_of(self, replica: Replica | None) -> RequestMetrics:
        name = "" if replica is None else str(replica.index)
        metrics = self.request_metrics.get(name)
        if metrics is None:
            metrics = self.request_metrics[name] = RequestMetrics()
        return metrics

    def _submit(self, pending: PendingRequest) -> None:
        """Send the request to a replica; if none is up, it waits for one."""
        up = self._up
        if not up or self.control.is_paused:
            return
        replica = choose_replica(up, pending.request)
        pending.replica = replica
        replica.num_unfinished_sequences += pending.num_unfinished
        replica.send(pending.request)

    def _unassign(self, pending: PendingRequest) -> Replica | None:
        """The request's replica, which counts it no longer; None if it has none."""
        replica, pending.replica = pending.replica, None
        if replica is not None:
            replica.num_unfinished_sequences -= pending.num_unfinished
            self.control.note_change()
        return replica

    def _accept(self) -> None:
        """Take over the channels of replicas that have been started."""
        loop = asyncio.get_running_loop()
        try:
            while (accepted := receive_connection(self._launcher)) is not None:
                index, connection = accepted
                self._lose(index)  # if its end has not been noticed yet
                replica = self._replicas[index]
                replica.connection = connection
                replica.num_starts += 1
                loop.add_reader(connection.updates.fileno(), self._receive, index)
        except ChannelClosed:  # this process ends with the launcher
            loop.remove_reader(self._launcher.fileno())
        except OSError as error:
            self._on_broken(error)

    def _receive(self, index: int) -> None:
        try:
            replica = self._replicas[index]
            assert replica.connection is not None, "only a connected replica is listened to"
            updates, deadline_s = replica.connection.updates, time.monotonic() + MAX_RECEIVE_S
            while time.monotonic() < deadline_s and (received := updates.drain(max_messages=1)):
                (message,) = received
                if isinstance(message, Ready):
                    assert message.limits is not None, "a manager is ready only with its engine's limits"
                    replica.start(message.limits)
                    self.control.take_in(replica, message)
                elif isinstance(message, LiveSample):
                    replica.sample, replica.is_asked = message, False
                    self._has_sample.set()
                else:
                    self._apply_update(replica, message)
            if updates.has_whole_message:
                asyncio.get_running_loop().call_soon(self._receive_rest, index, updates)
            elif updates.is_closed:
                self._lose(index)
        except Exception as error:
            self._on_broken(error)

    def _receive_rest(self, index: int, updates: Receiver[EngineUpdate | LiveSample | Ready]) -> None:
        """Receive what the channel still has, but only if the replica still has this channel."""
        connection = self._replicas[index].connection
        if connection is not None and connection.updates is updates:
            self._receive(index)

    def _apply_update(self, replica: Replica, update: EngineUpdate) -> None:
        # Statistics first, so that they count an answer by the time its client receives it.
        replica.stats = update.stats
        if replica.num_sampled_before is None:
            replica.num_sampled_before = update.stats.total_generation_tokens
        for delta in update.deltas:
            pending = self._pending.get(delta.request_id)
            if pending is None or pending.replica is not replica:  # cancelled while the delta was on its way
                continue
            pending.collector.add(pending.index, delta)
            pending.num_received_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._note_end(pending, delta, replica)
                replica.num_unfinished_sequences -= 1
                self.control.note_change()
                self._work.finish_sequence(pending.request)
        for done in update.done:
            self._commands.note(done)
        for progress in update.progress:
            pending = self._pending.get(progress.request_id)
            if pending is not None and pending.replica is replica:
                pending.progress[progress.sequence_index] = progress
        if update.progress:
            replica.step_cost = update.step_cost
            self._look_at_jobs()

    def _note_end(self, pending: PendingRequest, delta: SequenceDelta, replica: Replica | None) -> None:
        """delta: the last of one of the request's sequences."""
        pending.note_end(delta)
        if pending.job is not None:
            pending.job.note_end(pending, delta)
        metrics = self._metrics_of(replica)
        metrics.note_sequence(pending.request, delta)
        if pending.span is not None:
            pending.span.note_sequence(pending.request, delta)
        if pending.logged is not None:
            pending.logged.note_sequence(delta)
        if pending.num_unfinished == 0 and not pending.has_error:
            metrics.note_request(pending.request, pending.longest)
        elif pending.num_unfinished == 0:
            metrics.note_broken_request(pending.request, 0, "error")

    def go_on_with(self, replica: Replica) -> None:
        """The replica is ready, with the weights of the others."""
        replica.is_ready = True
        self.submit_waiting()
        if not self._has_been_up and self.limits is not None:
            self._has_been_up = True
            self._on_ready()

    @property
    def unsent(self) -> list[PendingRequest]:
        """Requests that wait for a replica, or for the end of a pause."""
        return [pending for pending in self._pending.values() if pending.replica is None]

    def submit_waiting(self) -> None:
        """Submit what waits, unless the engine is paused."""
        self._in_parts(iter(self.unsent), self._submit_again)

    def has(self, is_meant: Callable[[GenerateRequest], bool]) -> bool:
        """Whether such a request is unfinished, on a replica or not."""
        return any(one.num_unfinished > 0 and is_meant(one.request) for one in self._pending.values())

    async def abort(self, is_meant: Callable[[GenerateRequest], bool], only_waiting: bool = False) -> None:
        """End requests by "abort" with the tokens that they have; all others go on. Also while the engine is paused.
        only_waiting: requests of which a sequence runs go on, too."""
        meant = [pending for pending in self._pending.values() if is_meant(pending.request)]
        self.end_unsent([pending for pending in meant if pending.replica is None])
        ids: dict[Replica, list[str]] = {}
        for pending in meant:
            if pending.replica is not None:
                ids.setdefault(pending.replica, []).append(pending.request.request_id)

        async def tell(replica: Replica, request_ids: list[str]) -> None:
            with suppress(ReplicaLost):  # they run again
                ids = tuple(request_ids)
                await self._commands.run(replica, lambda command_id: AbortRequests(command_id, ids, only_waiting))

        await asyncio.gather(*(tell(replica, request_ids) for replica, request_ids in ids.items()))

    def end_unsent(self, requests: Sequence[PendingRequest]) -> None:
        """Abort requests that are still on no replica, and so have no tokens."""
        for pending in requests:
            request = pending.request
            is_left = self._pending.get(request.request_id) is pending and pending.replica is None
            if not is_left or pending.has_failed or pending.num_unfinished == 0:
                continue
            for index in range(request.num_sequences):
                version = request.adapter_version or self.control.weight_version
                delta = _abort_without_tokens(request, index, version)
                pending.collector.add(pending.index, delta)
                self._note_end(pending, delta, None)
                self._work.finish_sequence(request)

    def forget_session(self, session: str) -> None:
        """The next requests of this session may go to any replica. Does no harm if it is unknown."""
        for replica in self._replicas:
            replica.prefixes.forget_session(session)

    def _lose(self, index: int) -> None:
        """The replica's manager has died: its requests run again or fail. A new object stands for its next start."""
        lost = self._replicas[index]
        self._work_of_lost += _work_of(lost)
        self._num_sampled_by_lost += _num_sampled_by(lost)
        self._commands.lose(lost)
        self.control.note_change()
        self._replicas[index] = Replica(index=index, limits=lost.limits, num_starts=lost.num_starts)
        self._close(lost)
        self._in_parts(
            (pending for pending in list(self._pending.values()) if pending.replica is lost), self._run_again
        )

    def _in_parts(self, pending: Iterator[PendingRequest], handle: Callable[[PendingRequest], None]) -> None:
        """Calls `handle` for each of them that is still waited for, the first at once, the others soon."""
        part = list(islice(pending, MAX_AT_ONCE))
        for one in part:
            if self._pending.get(one.request.request_id) is one:
                handle(one)
        if len(part) == MAX_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._in_parts, pending, handle)

    def _run_again(self, pending: PendingRequest) -> None:
        self._unassign(pending)
        if pending.num_unfinished == 0:
            return
        pending.num_replays += 1
        num_finished = pending.request.num_sequences - pending.num_unfinished
        if pending.num_replays <= MAX_REPLAYS and pending.restart():
            self._work.restart_sequences(pending.request, num_finished)
            self._submit_again(pending)
        else:
            pending.fail(EngineDied("the engine died while it answered"))

    def _submit_again(self, pending: PendingRequest) -> None:
        """Submit a request that waits for a replica, if it still fits."""
        if pending.replica is not None or pending.num_unfinished == 0 or pending.has_failed:
            return
        limits = self.limits
        if limits is not None and pending.num_tokens > limits.max_tokens_per_sequence:
            pending.fail(EngineDied("the engine died, and its KV cache is smaller since its restart"))
        else:
            self._submit(pending)

    @staticmethod
    def _close(replica: Replica) -> None:
        if replica.connection is not None:
            asyncio.get_running_loop().remove_reader(replica.connection.updates.fileno())
            replica.connection.close()
        replica.connection, replica.stats, replica.is_ready = None, None, False
