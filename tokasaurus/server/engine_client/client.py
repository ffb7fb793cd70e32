"""The server's end of the channels to the managers: submits requests, collects or streams their sequences, cancels."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from tokasaurus.messages.channel import Channel
from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest, SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats, Ready
from tokasaurus.server.engine_client.collectors import FinishedSequence, Results, StreamCollector
from tokasaurus.server.engine_client.load_balancer import choose_replica
from tokasaurus.server.engine_client.queue_limits import NO_LIMITS, QueueLimits, UnfinishedWork


@dataclass(slots=True)
class _PendingRequest:
    """A submitted request that its caller is still waiting for."""

    request: GenerateRequest
    replica: int
    num_unfinished: int
    """Number of its sequences that have not finished."""
    add: Callable[[SequenceDelta], None]
    """Called with each delta of the request."""


def _raise(error: Exception) -> None:
    raise error


class EngineClient:
    """Submits requests to the replicas' managers and hands their deltas to the callers.

    One per server. All methods run on the event loop's thread.

    requests, updates: one channel per replica. on_ready: called once, when every replica is up. on_broken: called when
    a manager's message cannot be read or applied; answers are lost from then on. queue_limits: what may be unfinished.
    """

    def __init__(
        self,
        requests: Sequence[Channel[GenerateRequest | CancelRequest]],
        updates: Sequence[Channel[EngineUpdate | Ready]],
        on_ready: Callable[[], None] = lambda: None,
        on_broken: Callable[[Exception], None] = _raise,
        queue_limits: QueueLimits = NO_LIMITS,
    ) -> None:
        assert len(requests) == len(updates) > 0, "one channel each way per replica"
        self._requests = requests
        self._updates = updates
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._limits: list[EngineLimits | None] = [None] * len(updates)
        self._stats: list[EngineStats | None] = [None] * len(updates)
        self._num_unfinished_sequences = [0] * len(updates)
        self._pending: dict[str, _PendingRequest] = {}
        self._work = UnfinishedWork(queue_limits)
        self.is_draining = False
        """The server is stopping: requests in the engine continue, and the server sends no new ones."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context, the running event loop receives the managers' messages."""
        loop = asyncio.get_running_loop()
        for replica, channel in enumerate(self._updates):
            loop.add_reader(channel.reader.fileno(), self._receive, replica)
            # uvloop makes the pipe non-blocking. Reading a message that is still being written would then fail after
            # its length, and the rest of it would be read as another message.
            os.set_blocking(channel.reader.fileno(), True)
        try:
            yield
        finally:
            for channel in self._updates:
                loop.remove_reader(channel.reader.fileno())

    @property
    def limits(self) -> EngineLimits | None:
        """The limits of the replica with the shortest maximum sequence length; None until all replicas are up."""
        known = [limits for limits in self._limits if limits is not None]
        if len(known) < len(self._limits):
            return None
        return min(known, key=lambda limits: limits.max_tokens_per_sequence)

    @property
    def stats(self) -> Sequence[EngineStats | None]:
        """The latest statistics of each replica; None for a replica that is not up."""
        return self._stats

    @property
    def num_pending_requests(self) -> int:
        """Requests that a `generate` or `stream` call is waiting for or has not yet cleaned up."""
        return len(self._pending)

    def check_queue(self, client: str, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises QueueFull or InvalidRequest if a body of `client` cannot be submitted, see UnfinishedWork.check."""
        num_running = sum(stats.num_running for stats in self._stats if stats is not None)
        self._work.check(client, num_sequences, num_tokens, num_running)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[FinishedSequence]]:
        """The finished sequences of each request, in order of `sequence_index`.

        requests: at least one, each with a new request id. If the caller is cancelled, unfinished requests are
        cancelled at the managers. Raises as `check_queue`, and SequenceAborted as soon as one sequence is aborted.
        """
        results = Results(requests)
        with self._submitted(requests, results.add):
            await results.finished
        return results.sequences

    @contextmanager
    def stream(self, requests: Sequence[GenerateRequest]) -> Iterator[StreamCollector]:
        """Runs the requests within the context; their deltas are read from the collector.

        requests: at least one, each with a new request id, all `is_streamed`. At the end of the context, unfinished
        requests are cancelled at the managers. Raises as `check_queue`.
        """
        collector = StreamCollector(requests)
        with self._submitted(requests, collector.add):
            yield collector

    @contextmanager
    def _submitted(
        self, requests: Sequence[GenerateRequest], add: Callable[[int, SequenceDelta], None]
    ) -> Iterator[None]:
        """Runs the requests within the context. Calls `add` with the index of the request and each delta that arrives.

        Raises as `check_queue`.
        """
        num_sequences = sum(request.num_sequences for request in requests)
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        self.check_queue(requests[0].client, num_sequences, num_tokens)
        with ExitStack() as stack:
            for index, request in enumerate(requests):
                stack.enter_context(self._one_submitted(request, partial(add, index)))
            yield

    @contextmanager
    def _one_submitted(self, request: GenerateRequest, add: Callable[[SequenceDelta], None]) -> Iterator[None]:
        assert request.request_id not in self._pending, f"request id {request.request_id} used twice"
        replica = choose_replica(self._num_unfinished_sequences)
        pending = _PendingRequest(request, replica, request.num_sequences, add)
        self._pending[request.request_id] = pending
        self._num_unfinished_sequences[replica] += request.num_sequences
        self._work.add(request)
        self._requests[replica].send(request)
        try:
            yield
        finally:
            del self._pending[request.request_id]
            self._num_unfinished_sequences[replica] -= pending.num_unfinished
            self._work.remove(request, pending.num_unfinished)
            if pending.num_unfinished > 0:
                self._requests[replica].send(CancelRequest(request.request_id))

    def _receive(self, replica: int) -> None:
        try:
            self._apply_updates(replica)
        except Exception as error:
            self._on_broken(error)

    def _apply_updates(self, replica: int) -> None:
        for message in self._updates[replica].drain():
            if isinstance(message, Ready):
                self._start_replica(replica, message)
                continue
            # Statistics first, so that they count an answer by the time its client receives it.
            self._stats[replica] = message.stats
            for delta in message.deltas:
                pending = self._pending.get(delta.request_id)
                if pending is None:  # cancelled while the delta was on its way
                    continue
                pending.add(delta)
                if delta.finish_reason is not None:
                    pending.num_unfinished -= 1
                    self._num_unfinished_sequences[replica] -= 1
                    self._work.finish_sequence(pending.request)

    def _start_replica(self, replica: int, ready: Ready) -> None:
        assert ready.limits is not None, "a manager is ready only with its engine's limits"
        self._limits[replica] = ready.limits
        self._stats[replica] = EngineStats(
            num_running=0,
            num_waiting=0,
            num_kv_blocks_used=0,
            num_kv_blocks_total=ready.limits.num_kv_blocks,
            total_prompt_tokens=0,
            total_generation_tokens=0,
            worker_queue_depth=0,
        )
        if self.limits is not None:
            self._on_ready()
