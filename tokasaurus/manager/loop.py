"""Entry and main loop of the manager process: run one engine step, send updates, wait for the next message.

Beside the loop: what limits the requests that one round accepts (`Intake`), what notices a worker that hangs
(`WorkerWatch`), and how flags and the workers' limits become the engine's options.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.engine.kv_forecast import running_progress
from tokasaurus.manager.engine.live_sample import LiveSampler
from tokasaurus.manager.engine.work_left import left_and_oldest_wait, note_pace, step_cost
from tokasaurus.manager.planning.step_budget import make_step_limit
from tokasaurus.manager.state.engine_state import (
    EngineOptions,
    EngineState,
    HydragenOptions,
    make_state,
)
from tokasaurus.manager.state.grammar_manager import Grammars
from tokasaurus.messages.channel import (
    ChannelClosed,
    HasFileno,
    Receiver,
    Sender,
    ServerConnection,
    receive_server,
    send_to_all,
    wait,
)
from tokasaurus.messages.commands import CommandDone, EngineCommand, WorkerCommand
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest, SequenceProgress
from tokasaurus.messages.live import JobsLeft, LiveSample, TakeSample
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import (
    DEFAULT_HYDRAGEN,
    HEARTBEAT_SECONDS,
    KV_READS,
    Alive,
    EngineLimits,
    EngineStats,
    Failed,
    HydragenCosts,
    PhaseDone,
    Ready,
)
from tokasaurus.monitoring.cores import available_cores
from tokasaurus.monitoring.garbage import GarbageCollector
from tokasaurus.monitoring.step_stats import StatsdSender, StepStats
from tokasaurus.monitoring.timing import BusyFraction
from tokasaurus.monitoring.trace import NO_TRACE, Trace
from tokasaurus.text.grammars import load_grammar_vocabulary
from tokasaurus.text.special_stops import find_special_stops
from tokasaurus.text.stop_strings import StopTokens
from tokasaurus.text.token_decoder import TokenDecoder, TokenizerError, load_token_decoder
from tokasaurus.workers import num_replicas

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

RequestMessage = GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand

LARGE_BYTES = 16 << 20
"""Size of the array that `run_manager` frees at its start, in bytes."""

THREAD_END_SECONDS = 1.0
"""Longest wait for a grammar thread to end at shutdown, in seconds."""

SWITCH_SECONDS = 0.0005
"""Longest time that a thread waits for this process's GIL, in seconds. A tenth of Python's default, so that the threads
that read grammars and write to full pipes keep up with a fast device."""

MIN_STREAM_WAIT = 0.002
"""Shortest sleep until unsent tokens of a stream are due, in seconds: streams that are due soon wait for each other."""

PROGRESS_SECONDS = 1.0
"""Interval between reports of how far background sequences are, in seconds."""

_MANY_ROWS, _LONG_PREFIX = 512, 4096
"""Sequences and prefix tokens of a group that saves time if any group does."""

STATS_UPDATE_SECONDS = 0.25
"""Interval between updates of the server's counters while no sequence starts or ends, in seconds."""

LATE_FACTOR = 4.0
"""A step is late after this many times its longest plausible time, for each stage that it passes."""

PAUSE_SECONDS = 5 * HEARTBEAT_SECONDS
"""If the manager does not look for this long, it was probably stopped itself, and the worker with it. In seconds."""

INTAKE_SHARE = 0.25
"""Share of the time for which the worker has work that one round spends on new requests."""

IDLE_SECONDS = 0.005
"""Time for new requests while the worker has no work: their first step should start soon."""

MIN_MESSAGES = 4
"""Messages accepted in every round: no burst waits for ever. It also bounds what a wrong estimate can do."""

NEW_WEIGHT = 0.1
"""Weight of the newest round in the moving average of the time per message."""


def run_manager(
    config: ServerConfig,
    checkpoint: Checkpoint,
    index: int,
    launcher: socket.socket,
    inputs: list[Sender[ForwardInput | WorkerCommand]],
    outputs: Receiver[ForwardOutput | Ready | CommandDone],
    stages: StageBoard | None,
    status: Sender[PhaseDone | Ready | Failed | Alive],
) -> None:
    """Process entry. Returns when the other end of `launcher` or `outputs` is closed, before or after the worker is
    ready.

    index: of the replica. launcher: hands over the channels to each server, see `ServerLink`. inputs: one channel per
    rank of the replica's worker; each channel gets every message, and is closed at the end. stages: what the pipeline
    stages count; None if there is only one.
    """
    started = time.monotonic()
    sys.setswitchinterval(SWITCH_SECONDS)
    # Freeing one large array makes glibc keep the memory of smaller arrays freed later. Otherwise every array of some
    # tens of kilobytes is returned to the system and faulted in again.
    large = np.empty(LARGE_BYTES, np.uint8)
    del large
    decoder = load_token_decoder(checkpoint.tokenizer_directory)
    stop_tokens = StopTokens([decoder.decode([token_id]) for token_id in range(checkpoint.info.vocab_size)])
    grammars = _load_grammars(checkpoint)  # while the worker loads the model: later it would delay a step
    status.send(PhaseDone("manager", "load tokenizer", time.monotonic() - started))
    server = ServerLink(launcher)
    limits = _await_workers(server, outputs, len(inputs))
    if limits is not None:
        options = engine_options(config, checkpoint.info.eos_ids, limits, decoder, stop_tokens)
        logger.debug("steps with prompts: %s (max_step_seconds)", options.step_limit.describe())
        # The launcher first: if this process dies once the server is ready, it must know that the start succeeded.
        status.send(Ready("manager", limits, checkpoint.weight_updates))
        state = make_state(options, grammars)
        state.weight_versions = ((0, checkpoint.weight_version),)
        state.weight_updates = [*checkpoint.weight_updates]
        trace = NO_TRACE if config.trace is None else Trace.of(config, "manager", index, row=0)
        channels = _Channels(server, inputs, outputs, status)
        statsd = None
        if config.statsd_server_url is not None:
            prefix = "toka" if num_replicas(config) == 1 else f"toka.replica_{index}"
            statsd = StatsdSender(config.statsd_server_url, prefix)
        step_stats = StepStats(config.stats_report_seconds)
        _serve(state, step_stats, statsd, LiveSampler(stages), config.watchdog_seconds, channels, trace)
        trace.write()
    for channel in inputs:
        channel.close()
    if grammars is not None:
        grammars.close(THREAD_END_SECONDS)


def _load_grammars(checkpoint: Checkpoint) -> Grammars | None:
    """None if grammars do not support the model's tokenizer; a warning is logged."""
    info = checkpoint.info
    try:
        vocabulary = load_grammar_vocabulary(checkpoint.tokenizer_directory, info.vocab_size, info.eos_ids)
    except TokenizerError as error:
        logger.warning(str(error))
        return None
    return Grammars(vocabulary, num_threads=min(8, max(1, available_cores() // 4)))


class ServerLink:
    """The manager's end of the channels to the server. The launcher hands over new ones when it has started the server
    again, and closes its end of `launcher` when no server will come any more."""

    def __init__(self, launcher: socket.socket) -> None:
        launcher.setblocking(False)
        self.launcher = launcher
        self._connection: ServerConnection | None = None
        """None before the first server, and from the death of one to the start of the next."""
        self.is_new = False
        """The server has not been told that the engine is ready, and has sent nothing."""
        self.is_closed = False
        """The launcher has closed its end."""

    @property
    def readers(self) -> list[HasFileno | int]:
        """Readable when `look` or `drain` has something to do."""
        return [self.launcher, *([] if self._connection is None else [self._connection.requests])]

    def look(self) -> bool:
        """Take over new channels; whether the server that had the earlier ones is gone."""
        is_gone = False
        if self._connection is not None and self._connection.requests.is_closed:
            is_gone = self._drop()
        try:
            while (connection := receive_server(self.launcher)) is not None:
                is_gone |= self._drop()
                self._connection, self.is_new = connection, True
        except ChannelClosed:
            self.is_closed = True
        return is_gone

    def _drop(self) -> bool:
        """Close the channels, if there are any; whether there were."""
        connection, self._connection, self.is_new = self._connection, None, False
        if connection is not None:
            connection.close()
        return connection is not None

    def drain(self, max_messages: int) -> list[RequestMessage]:
        """As Receiver.drain."""
        return [] if self._connection is None else self._connection.requests.drain(max_messages)

    @property
    def has_whole_message(self) -> bool:
        """As Receiver.has_whole_message."""
        return self._connection is not None and self._connection.requests.has_whole_message

    def greet(self, ready: Ready, update: EngineUpdate) -> None:
        """Tell a new server that the engine is ready, and what it does."""
        self.is_new = False
        self.send(ready)
        self.send(update)

    def send(self, message: EngineUpdate | LiveSample | Ready) -> None:
        """Nothing happens without a server, nor before it was greeted: it waits for nothing."""
        if self._connection is not None and not self.is_new:
            self._connection.updates.send(message)


def _await_workers(
    server: ServerLink, outputs: Receiver[ForwardOutput | Ready | CommandDone], num_workers: int
) -> EngineLimits | None:
    """Wait for all workers and return what all of them can do; None if a channel is closed."""
    found: list[EngineLimits] = []
    while len(found) < num_workers:
        wait([server.launcher, outputs])
        server.look()
        messages = outputs.drain()
        if server.is_closed or (outputs.is_closed and not messages):
            return None
        for message in messages:
            assert isinstance(message, Ready), f"{type(message).__name__} before the worker was ready"
            assert message.limits is not None, "the worker is ready without limits"
            found.append(message.limits)
    return common_limits(found)


def common_limits(limits: Sequence[EngineLimits]) -> EngineLimits:
    """What all workers of a replica can do, since they run the same steps.

    The smallest capacity and the highest costs of any worker, and every feature that any of them has switched off. All
    have blocks of the same size. No prefix groups if any worker computes none.
    """
    assert len({one.page_size for one in limits}) == 1
    costs, hydragen = [one.hydragen for one in limits if one.hydragen is not None], None
    if len(costs) == len(limits):
        highest = HydragenCosts(*map(max, zip(*map(astuple, costs), strict=True)))
        hydragen = replace(highest, recorded_groups=min(each.recorded_groups for each in costs))
    shortest = min(limits, key=lambda one: one.max_tokens_per_sequence)
    return EngineLimits(
        num_kv_blocks=min(one.num_kv_blocks for one in limits),
        page_size=limits[0].page_size,
        max_tokens_per_sequence=shortest.max_tokens_per_sequence,
        hydragen=hydragen,
        seconds_per_token=max(one.seconds_per_token for one in limits),
        limited_by=shortest.limited_by,
        seconds_per_step=max(one.seconds_per_step for one in limits),
        seconds_per_pair=max(one.seconds_per_pair for one in limits),
        switched_off=tuple(dict.fromkeys(name for one in limits for name in one.switched_off)),
        dtype=limits[0].dtype,
        device=limits[0].device,
        num_routed_experts=limits[0].num_routed_experts,
        no_routed_experts=limits[0].no_routed_experts,
        no_adapters=limits[0].no_adapters,
        windows=limits[0].windows,
        num_snapshots=min(one.num_snapshots for one in limits),
        max_seqs=min((one.max_seqs for one in limits if one.max_seqs is not None), default=None),
    )


@dataclass(frozen=True, slots=True)
class _Channels:
    """This process's ends of the channels: see `run_manager`."""

    server: ServerLink
    inputs: list[Sender[ForwardInput | WorkerCommand]]
    outputs: Receiver[ForwardOutput | Ready | CommandDone]
    status: Sender[PhaseDone | Ready | Failed | Alive]


def _serve(
    state: EngineState,
    step_stats: StepStats,
    statsd: StatsdSender | None,
    sampler: LiveSampler,
    watchdog_seconds: float,
    channels: _Channels,
    trace: Trace,
) -> None:
    """Run engine steps until the link to the server or `outputs` is closed, or the worker hangs.

    watchdog_seconds: shortest time after which a step may count as hanging.
    """

    server, outputs = channels.server, channels.outputs
    others: list[HasFileno | int] = [] if state.grammars is None else [state.grammars.reader]

    def send(message: ForwardInput | WorkerCommand) -> None:
        send_to_all(channels.inputs, message)

    engine = Engine(state, send, trace, send)
    busy, garbage, intake = BusyFraction(), GarbageCollector(), Intake()
    last_stats, last_update_s = state.stats(), time.monotonic()
    last_progress_s = last_update_s
    watch, last_alive_s = WorkerWatch(watchdog_seconds, last_update_s), -math.inf
    messages: list[RequestMessage] = []
    while not (server.is_closed or outputs.is_closed):
        start_s = time.monotonic()
        if server.look():
            messages = []
            engine.forget_server()
        if server.is_new and state.sent_command is None:  # once the weights are known
            state.done = []
            ready = Ready("manager", state.options.limits, tuple(state.weight_updates), state.is_paused)
            server.greet(ready, EngineUpdate([], state.stats(busy.read(start_s), time.process_time())))
        oldest = state.steps_in_flight[0].step_id if state.steps_in_flight else state.next_step_id
        trace.cover(oldest, state.next_step_id)
        if not messages and not state.steps_in_flight:
            trace.pause()
        with trace.span("engine step"):
            engine.step(messages, [message for message in outputs.drain() if not isinstance(message, Ready)])
        now_s = time.monotonic()
        busy.add_busy(start_s, now_s)
        if now_s - last_alive_s >= HEARTBEAT_SECONDS:
            channels.status.send(Alive())
            last_alive_s = now_s
            if watch.is_late(state, now_s):
                channels.status.send(Failed("model worker", "it did not return a step in time (watchdog_seconds)"))
                return
        stats = state.stats(busy.read(now_s), time.process_time())
        progress: list[SequenceProgress] = []
        if now_s - last_progress_s >= PROGRESS_SECONDS:
            note_pace(state, now_s)
            progress, last_progress_s = running_progress(state) if state.slots.num_reporting else [], now_s
        if state.deltas or state.done or progress or is_worth_an_update(stats, last_stats, now_s - last_update_s):
            cost = step_cost(state) if progress else None
            server.send(EngineUpdate(state.deltas, stats, progress, state.done, cost))
            state.deltas, state.done = [], []
            last_stats, last_update_s = stats, now_s
        window = step_stats.report(now_s, state.step_totals, stats, partial(left_and_oldest_wait, state, now_s))
        if window is not None:
            logger.info(window.line(), extra={"fields": window.fields()})
            logger.debug(window.details())
            if statsd is not None:
                statsd.send(window)
        if state.asked_sample is not None and sampler.is_due(state, engine.seconds_left(), now_s):
            server.send(sampler.take(state, stats, engine.timers.totals))
        garbage.collect(engine.seconds_left(), is_idle=stats.num_running == stats.num_waiting == 0)
        greets = server.is_new and state.sent_command is None
        has_more = greets or server.has_whole_message or state.cancelled or state.ending
        timeouts_s = [
            0.0 if has_more else math.inf,
            max(MIN_STREAM_WAIT, state.stream_due_s - now_s),
            max(0.0, last_alive_s + HEARTBEAT_SECONDS - now_s),
        ]
        reports_s = (step_stats.seconds_to_report(now_s), busy.seconds_to_report(now_s))
        timeouts_s += [seconds for seconds in reports_s if seconds is not None]
        timeout_s = min(timeouts_s)
        quiet_s = min(timeout_s, engine.seconds_results_may_wait())
        if not (quiet_s and wait([*server.readers, *others], quiet_s)):
            wait([*server.readers, *others, outputs], timeout_s - quiet_s)
        max_messages = intake.max_messages(engine.seconds_left(), is_idle=not state.steps_in_flight)
        start_s = time.monotonic()
        messages = server.drain(max_messages)
        intake.note(len(messages), time.monotonic() - start_s + engine.seconds_per_message * len(messages))


class WorkerWatch:
    """Notices a worker that hangs: it does not return a step for much longer than the step should take.

    Look at least every HEARTBEAT_SECONDS. watchdog_seconds: no step is late before this time, in seconds.
    """

    def __init__(self, watchdog_seconds: float, now_s: float) -> None:
        self._watchdog_seconds = watchdog_seconds
        self._last_result_id = -1
        self._progress_s = self._looked_s = now_s

    def is_late(self, state: EngineState, now_s: float) -> bool:
        """Whether the oldest step in flight is late. now_s: by a clock that never goes back, in seconds."""
        was_stopped = now_s - self._looked_s > PAUSE_SECONDS
        self._looked_s = now_s
        if not state.steps_in_flight or state.last_result_id != self._last_result_id or was_stopped:
            self._last_result_id, self._progress_s = state.last_result_id, now_s
            return False
        longest_s = state.step_times.longest(state.steps_in_flight[0].cost)
        waited_s: float = now_s - self._progress_s
        return waited_s > max(self._watchdog_seconds, LATE_FACTOR * state.options.config.pp_size * longest_s)


class Intake:
    """Bounds the requests and cancellations of a round by the time that earlier ones took, so that a burst does not
    keep the manager from sending steps."""

    def __init__(self) -> None:
        self._message_seconds = 1e-4

    def max_messages(self, seconds_left: float, is_idle: bool) -> int:
        """Most messages to accept now. seconds_left: how long the worker is busy with the steps it has.

        is_idle: it has none.
        """
        seconds = IDLE_SECONDS if is_idle else INTAKE_SHARE * seconds_left
        return max(MIN_MESSAGES, int(seconds / self._message_seconds))

    def note(self, num_messages: int, seconds: float) -> None:
        """To read and queue these messages took `seconds`."""
        if num_messages:
            self._message_seconds += NEW_WEIGHT * (max(1e-6, seconds / num_messages) - self._message_seconds)


def engine_options(
    config: ServerConfig,
    eos_ids: Iterable[int],
    limits: EngineLimits,
    decoder: TokenDecoder,
    stop_tokens: StopTokens | None,
) -> EngineOptions:
    """The flags, and what follows from them for this model and these workers.

    eos_ids: the model's end-of-sequence token ids. stop_tokens: tokens that may complete a stop string; None for all.
    """
    return EngineOptions(
        config=config,
        limits=limits,
        eos_ids=frozenset(eos_ids),
        decode_text=decoder.decode,
        prompt_tail=decoder.prompt_tail,
        special_ids=decoder.special_ids,
        special_stops=partial(find_special_stops, decoder),
        decode_special=decoder.with_special().decode,
        special_tail=decoder.with_special().prompt_tail,
        stop_tokens=stop_tokens,
        step_limit=make_step_limit(config.max_step_seconds, limits.seconds_per_step),
        hydragen=_hydragen_options(config, limits),
        num_microbatches=1 if config.pp_size == 1 else config.pp_size + config.pp_num_buffer_stages,
    )


def _hydragen_options(config: ServerConfig, limits: EngineLimits) -> HydragenOptions | None:
    """Minimums from the flags, and costs from the worker's measurements, which steps in service correct.

    None if a flag disables prefix groups, or the workers compute none. use_hydragen=T forms groups also where the
    measured costs allow none, if they read far fewer tokens. If both minimums are set, the worker measures nothing, and
    groups are compared by the KV that they read. With pipeline stages, the time of a step depends on the steps before
    it, and corrects nothing.
    """
    size, length, costs = config.hydragen_min_group_size, config.hydragen_min_prefix_len, limits.hydragen
    if config.use_hydragen is False or costs is None:
        return None
    if size is not None and length is not None:
        return HydragenOptions(size, -(-length // limits.page_size), KV_READS)
    if config.use_hydragen and costs.saved(_MANY_ROWS, _LONG_PREFIX) <= costs.step_price(1):
        costs = DEFAULT_HYDRAGEN
    return HydragenOptions(
        min_group_size=2 if size is None else size,
        min_blocks=1 if length is None else -(-length // limits.page_size),
        costs=costs,
        is_tried=config.use_hydragen is None and config.pp_size == 1,
    )


def is_worth_an_update(stats: EngineStats, last: EngineStats, seconds_since_last: float) -> bool:
    """Whether to send `stats` to the server although there are no deltas.

    Immediately when the number of running or waiting sequences changes, or when the engine becomes idle, because no
    later update would correct the server's figures. Otherwise every STATS_UPDATE_SECONDS.
    """
    if stats == last:
        return False
    if (stats.num_running, stats.num_waiting) != (last.num_running, last.num_waiting):
        return True
    is_idle = stats.num_running == 0 and stats.num_waiting == 0 and stats.worker_queue_depth == 0
    return is_idle or seconds_since_last >= STATS_UPDATE_SECONDS
