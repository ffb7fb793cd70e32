"""A scripted engine: exchanges the manager's messages over real channels and computes nothing."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokasaurus.messages.channel import (
    ChannelClosed,
    Receiver,
    Sender,
    make_connection,
    send_connection,
)
from tokasaurus.messages.commands import AbortRequests, CommandDone, EngineCommand, UpdateWeights
from tokasaurus.messages.generation import (
    CancelRequest,
    EngineUpdate,
    ErrorCode,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    SequenceDelta,
    TopLogprobs,
)
from tokasaurus.messages.live import JobsLeft, LiveSample, TakeSample
from tokasaurus.messages.status import EngineLimits, EngineStats, Ready, TimeLeft


@dataclass(frozen=True)
class Reply:
    """One sequence as the engine returns it."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: FinishReason | None = "stop"
    """None: the sequence stays unfinished after these tokens."""
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_shared_tokens: int = 0
    top: TopLogprobs | None = None
    error: str = ""
    error_code: ErrorCode | None = None


# The reply for one sequence of a request; None: the sequence is never answered.
Script = Callable[[GenerateRequest, int], Reply | None]

LIMITS = EngineLimits(num_kv_blocks=64, page_size=16, max_tokens_per_sequence=512)


def echo(request: GenerateRequest, _sequence_index: int) -> Reply:
    """The prompt's first max_new_tokens tokens, with logprobs -0.5, -1.0, -1.5, ..."""
    token_ids = request.prompt_ids.tolist()[: request.max_new_tokens]
    logprobs = [-0.5 * (position + 1) for position in range(len(token_ids))] if request.want_logprobs else None
    return Reply(token_ids, logprobs, "length")


def prompt_logprobs(request: GenerateRequest) -> PromptLogprobs:
    """The token at position p has rank 1 + p % 7; the other most likely tokens are 97, 98, ...

    The logprob of rank r is -r / 2.
    """
    num_tokens, count = len(request.prompt_ids), request.num_top_prompt_logprobs
    ranks = np.arange(num_tokens, dtype=np.int32) % 7 + 1
    top = TopLogprobs(np.zeros((num_tokens, count), np.int32), np.full((num_tokens, count), np.nan, np.float32))
    for position in range(1, num_tokens):
        most_likely = [token_id for token_id in range(97, 98 + count) if token_id != request.prompt_ids[position]]
        most_likely.insert(ranks[position] - 1, int(request.prompt_ids[position]))
        top.token_ids[position] = most_likely[:count]
        top.logprobs[position] = -0.5 * np.arange(1, count + 1)
    logprobs = (-0.5 * ranks).astype(np.float32)
    ranks[0], logprobs[0] = 0, np.nan
    return PromptLogprobs(logprobs, ranks, top if count else None)


@dataclass
class FakeEngine:
    """Runs in a thread between `start` and `stop`.

    One update answers all sequences of a request, and its stats count them. A streamed request is answered in several
    updates. AbortRequests ends the sequences that are unfinished; those without any answer wait.
    """

    script: Script = echo
    """May be replaced at any time."""
    limits: EngineLimits = LIMITS
    requests: list[GenerateRequest] = field(default_factory=list, repr=False)
    """Requests received, in order. Wait for them with `wait_until`."""
    cancelled: list[str] = field(default_factory=list)
    """Ids of cancelled requests, in order of arrival."""
    delta_size: int = 1
    """Tokens of each sequence per update of a streamed request."""
    pause_s: float = 0.0
    """Seconds between the updates of a streamed request."""
    before_update: Callable[[], object] = lambda: None
    """Called before each update of a streamed request but the first; the update waits for its end."""
    launcher_end: socket.socket | None = None
    """Set by `hand_over`: later connections of the replica can be sent over it."""
    on_command: Callable[[EngineCommand], str] = lambda _: ""
    """Called with each command; returns why it is refused."""
    update_number: int = 0
    """Of the weights that it starts with."""
    is_paused: bool = False
    """By a server before this one."""
    commands: list[EngineCommand] = field(default_factory=list)
    """Commands received, in order."""
    asked_samples: list[TakeSample] = field(default_factory=list)
    """Received, in order."""
    jobs_left: TimeLeft | None = None
    """As the server has told last."""
    sample: Callable[[TakeSample], LiveSample | None] = lambda _: None
    """Makes the answer; None: there is none."""
    max_deltas: int = 1 << 30
    """Most deltas of one update; a manager's updates have those of one step."""

    def __post_init__(self) -> None:
        self._requests_in: Receiver[Any]
        self.updates: Sender[Any]
        self.connection, own = make_connection()
        """The server's ends."""
        self._requests_in, self.updates = own.requests, own.updates
        self.stats = EngineStats(0, 0, 0, self.limits.num_kv_blocks, 0, 0, 0)
        self._unfinished: dict[str, list[tuple[int, Reply | None]]] = {}
        """(index, reply) of the unfinished sequences, by request."""
        self.has_told = threading.Event()
        """Set when it has said that it is ready."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def die(self) -> None:
        """End as a killed manager does: nothing more is read or written."""
        self.stop()
        self._requests_in.close()
        self.updates.close()

    def wait_until(self, condition: Callable[["FakeEngine"], bool], timeout_s: float = 60.0) -> None:
        """Blocks until `condition` is true. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"requests: {self.requests}, cancelled: {self.cancelled}")

    def _run(self) -> None:
        updates = (weights(self.update_number),) if self.update_number else ()
        self.updates.send(Ready("manager", self.limits, updates, self.is_paused))
        self.has_told.set()
        while not self._is_stopping:
            try:
                message = self._requests_in.receive(0.02)
            except TimeoutError:
                continue
            except ChannelClosed:
                return
            with self._changed:
                if isinstance(message, GenerateRequest):
                    self.requests.append(message)
                elif isinstance(message, CancelRequest):
                    self.cancelled.append(message.request_id)
                elif isinstance(message, TakeSample):
                    self.asked_samples.append(message)
                elif isinstance(message, JobsLeft):
                    self.jobs_left = message.time_left
                else:
                    self.commands.append(message)
                self._changed.notify_all()
            if isinstance(message, TakeSample):
                sample = self.sample(message)
                if sample is not None:
                    self.updates.send(sample)
            elif not isinstance(message, GenerateRequest | CancelRequest | JobsLeft):
                done = CommandDone(message.command_id, self.on_command(message))
                if not self._is_stopping:
                    aborted = self._abort(message) if isinstance(message, AbortRequests) else []
                    self.updates.send(EngineUpdate(aborted, self.stats, [], [done]))
            # Answered only after it is in `requests`, where a test looks it up when the client has its answer.
            if isinstance(message, GenerateRequest):
                self._answer(message)

    def _abort(self, command: AbortRequests) -> list[SequenceDelta]:
        deltas = []
        for request_id in command.request_ids:
            unfinished = self._unfinished.get(request_id, [])
            if command.only_waiting and any(reply is not None for _, reply in unfinished):
                continue
            for index, reply in unfinished:
                begun = Reply([]) if reply is None else reply
                counts = begun.num_cached_tokens, begun.num_computed_tokens, begun.num_recomputed_tokens
                deltas.append(SequenceDelta(request_id, index, [], None, "abort", *counts, begun.num_shared_tokens))
            self._unfinished.pop(request_id, None)
        return deltas

    def _answer(self, request: GenerateRequest) -> None:
        replies = [self.script(request, index) for index in range(request.num_sequences)]
        unfinished = [
            (index, reply) for index, reply in enumerate(replies) if reply is None or reply.finish_reason is None
        ]
        self._unfinished[request.request_id] = unfinished
        deltas = [
            SequenceDelta(
                request_id=request.request_id,
                sequence_index=index,
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                num_cached_tokens=reply.num_cached_tokens,
                num_computed_tokens=reply.num_computed_tokens,
                num_recomputed_tokens=reply.num_recomputed_tokens,
                num_shared_tokens=reply.num_shared_tokens,
                top=reply.top,
                error=reply.error,
                error_code=reply.error_code,
                prompt_logprobs=prompt_logprobs(request) if request.want_prompt_logprobs and index == 0 else None,
            )
            for index, reply in enumerate(replies)
            if reply is not None
        ]
        self.stats = replace(
            self.stats,
            total_prompt_tokens=self.stats.total_prompt_tokens + len(request.prompt_ids),
            total_generation_tokens=self.stats.total_generation_tokens + sum(len(delta.token_ids) for delta in deltas),
            total_prefix_cache_hit_tokens=self.stats.total_prefix_cache_hit_tokens
            + sum(delta.num_cached_tokens for delta in deltas),
        )
        num_updates = 1
        if request.is_streamed:
            num_updates = max((max(1, -(-len(delta.token_ids) // self.delta_size)) for delta in deltas), default=0)
        for number in range(num_updates):
            if number > 0:
                time.sleep(self.pause_s)
                self.before_update()
            updated = [self._cut_delta(delta, number) for delta in deltas] if request.is_streamed else deltas
            # Reversed: sequences may finish in any order.
            sent = [delta for delta in updated[::-1] if delta is not None]
            for start in range(0, max(1, len(sent)), self.max_deltas):
                self.updates.send(EngineUpdate(sent[start : start + self.max_deltas], self.stats))

    def _cut_delta(self, delta: SequenceDelta, number: int) -> SequenceDelta | None:
        """The tokens of update `number`; None when an earlier update had the last ones."""
        start, end = number * self.delta_size, (number + 1) * self.delta_size
        if number > 0 and start >= len(delta.token_ids):
            return None
        return replace(
            delta,
            token_ids=delta.token_ids[start:end],
            logprobs=None if delta.logprobs is None else delta.logprobs[start:end],
            top=None
            if delta.top is None
            else TopLogprobs(delta.top.token_ids[start:end], delta.top.logprobs[start:end]),
            finish_reason=delta.finish_reason if end >= len(delta.token_ids) else None,
            error=delta.error if end >= len(delta.token_ids) else "",
            prompt_logprobs=delta.prompt_logprobs if number == 0 else None,
        )


def hand_over(*engines: FakeEngine) -> socket.socket:
    """The server's end of the socket from the launcher, over which the engines' connections arrive."""
    launcher_end, server_end = socket.socketpair()
    for index, engine in enumerate(engines):
        engine.launcher_end = launcher_end
        send_connection(launcher_end, index, engine.connection)
    return server_end


def weights(number: int) -> UpdateWeights:
    """The update of this number of an earlier server, which replaced all weights."""
    return UpdateWeights(0, f"/weights/{number}", str(number), number=number)


def never(_request: GenerateRequest, _index: int) -> Reply | None:
    return None


def start_again(
    dead: FakeEngine, replica: int = 0, limits: EngineLimits | None = None, update_number: int = 0
) -> FakeEngine:
    """What the launcher does: a new engine on new channels."""
    limits = dead.limits if limits is None else limits
    engine = FakeEngine(script=dead.script, limits=limits, update_number=update_number)
    engine.launcher_end = dead.launcher_end
    assert dead.launcher_end is not None
    send_connection(dead.launcher_end, replica, engine.connection)
    engine.start()
    return engine
