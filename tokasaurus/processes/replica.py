"""The launcher's view of one replica: starts its manager and model workers, finds out that one died or hangs, and
decides when to start it again."""

from __future__ import annotations

import math
import socket
import time
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from tokasaurus.messages.channel import Receiver, ReplicaConnection, Sender, make_channel, send_connection
from tokasaurus.messages.commands import add_update
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import HEARTBEAT_SECONDS, Alive, Failed, PhaseDone, PhaseProgress, Ready, WeightsChanged
from tokasaurus.processes.group import DEATH_S, Child, ChildProcess, ProcessGroup

if TYPE_CHECKING:  # these import NumPy, which would delay the start of the other processes
    from tokasaurus.checkpoint import Checkpoint
    from tokasaurus.config import ServerConfig
    from tokasaurus.messages.commands import CommandDone, EngineCommand, UpdateWeights, WorkerCommand
    from tokasaurus.messages.forward import ForwardInput, ForwardOutput
    from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest
    from tokasaurus.messages.live import LiveSample, TakeSample
    from tokasaurus.startup_report import StartupReport

PAUSE_SECONDS = 5 * HEARTBEAT_SECONDS
"""If the launcher does not look for this long, it was stopped itself, and probably the other processes with it."""

LATE_SECONDS = 2 * HEARTBEAT_SECONDS
"""A sign of life may be this late because the machine is busy, in seconds."""

MIN_START_SECONDS = 120.0
START_FACTOR = 4
"""A restart hangs if it takes longer than MIN_START_SECONDS, and START_FACTOR times as long as the first start."""

SETTLE_SECONDS = 0.2
"""Time for the other processes of a replica to end after one has ended, so that the cause is found."""

HEALTHY_SECONDS = 10.0
"""A replica that was ready for this long had no lasting fault: earlier failures are forgotten."""

MAX_PAUSE_SECONDS = 30.0


class ReplicaProcesses:
    """The manager and the workers of one replica. `children` is empty between a failure and the next start.

    server: the socket over which the server gets the channels to each new manager.
    """

    def __init__(
        self,
        index: int,
        group: ProcessGroup,
        config: ServerConfig,
        checkpoint: Checkpoint,
        manager_entry: str,
        worker_entry: str,
        server: socket.socket,
        weights: WeightHistory,
    ) -> None:
        self.children: list[Child] = []
        self.restart_at_s: float | None = None
        """When to start again, by time.monotonic(); None while it runs."""
        self.has_been_ready = False
        self.num_restarts = 0
        self.exit_code = 1
        """Exit code of the launcher if a failure of this replica ends it."""
        self.is_given_up = False
        """It has failed too often and is not started again, while other replicas go on."""
        self.name = "the engine" if config.dp_size == 1 else f"replica {index}"
        self._number = "" if config.dp_size == 1 else f" {index}"  # in the names of its processes
        self.policy = RestartPolicy(config.max_restarts)
        self._index = index
        self._group = group
        self._config = config
        self._checkpoint = checkpoint
        self._weights = weights
        self._manager_entry = manager_entry
        self._worker_entry = worker_entry
        self._server = server
        self._is_ready = False
        self._started_s = self._alive_s = self._looked_s = time.monotonic()
        self._longest_start_s = math.inf

    def start(self) -> None:
        """Start all processes, workers first because they take longest, and connect them with the server."""
        config = self._config
        if self.num_restarts:  # its steps have the same numbers again, so that nobody could tell them apart in a trace
            config = copy(config)
            config.trace = None
        requests_in: Receiver[GenerateRequest | CancelRequest | TakeSample | EngineCommand]
        requests: Sender[GenerateRequest | CancelRequest | TakeSample | EngineCommand]
        updates: Receiver[EngineUpdate | LiveSample | Ready]
        updates_out: Sender[EngineUpdate | LiveSample | Ready]
        outputs: Receiver[ForwardOutput | Ready | CommandDone]
        outputs_out: Sender[ForwardOutput | Ready | CommandDone]
        (requests_in, requests), (updates, updates_out), (outputs, outputs_out) = (
            make_channel(),
            make_channel(),
            make_channel(),
        )
        checkpoint = self._checkpoint
        if self._weights.updates:
            checkpoint = replace(checkpoint, weight_updates=tuple(self._weights.updates))
        self._started_s = self._alive_s = self._looked_s = time.monotonic()
        self._is_ready, self.restart_at_s, self.exit_code = False, None, 1
        inputs: list[Sender[ForwardInput | WorkerCommand]] = []
        num_workers = config.pp_size * config.tp_size
        rendezvous = self._group.new_path() if num_workers > 1 else None
        stages = StageBoard(config.pp_size) if config.pp_size > 1 else None
        for rank in range(num_workers):
            input_in: Receiver[ForwardInput | WorkerCommand]
            input_out: Sender[ForwardInput | WorkerCommand]
            input_in, input_out = make_channel()
            label, title = f"model worker{self._number} (rank {rank})", f"toka-worker{self._number.strip()}-{rank}"
            worker = ChildProcess(label, title, self._worker_entry)
            index = self._index * num_workers + rank
            arguments = config, checkpoint, index, rendezvous, input_in, outputs_out, stages
            self.children.append(self._group.start(worker, *arguments))
            input_in.close()
            inputs.append(input_out)
        title = f"toka-manager{self._number.strip()}"
        manager = ChildProcess(f"manager{self._number}", title, self._manager_entry)
        channels = (requests_in, updates_out, inputs, outputs, stages)
        self.children.append(self._group.start(manager, config, checkpoint, self._index, *channels))
        # The ends belong to the processes now: a copy here would keep a channel open after its process has died.
        for receiver in (requests_in, outputs):
            receiver.close()
        updates_out.close()
        outputs_out.close()
        for sender in inputs:
            sender.close()
        send_connection(self._server, self._index, ReplicaConnection(requests, updates))

    def stop(self) -> None:
        """Kill all processes of the replica."""
        self._group.remove(self.children)
        self.children = []

    @property
    def is_intact(self) -> bool:
        """It has been started, and none of its processes has died."""
        return bool(self.children) and all(child.process.is_alive() for child in self.children)

    def find_failure(self, report: StartupReport) -> str | None:
        """One line that says which process failed and how; None if none did."""
        now_s = time.monotonic()
        if now_s - self._looked_s > PAUSE_SECONDS:
            self._alive_s = now_s
        self._looked_s = now_s
        failed = self._read_status(report, now_s)
        if not failed and all(child.process.is_alive() for child in self.children):
            return self._find_hang(now_s)
        time.sleep(SETTLE_SECONDS)
        failed += self._read_status(report, now_s)
        return describe_failure(self.children, failed)

    def _read_status(self, report: StartupReport, now_s: float) -> list[Failed]:
        failed: list[Failed] = []
        for child in self.children:
            for message in child.status.drain():
                match message:
                    case Failed():
                        failed.append(message)
                        self.exit_code = max(self.exit_code, message.exit_code)
                    case PhaseDone():
                        report.show_phase(child.description.label, message)
                    case PhaseProgress():
                        report.note_progress(child.description.label, message)
                    case WeightsChanged():
                        self._weights.note(message.update)
                    case Alive():
                        self._alive_s = now_s
                    case Ready():
                        report.note_ready(message, is_server=False)
                        if message.process == "manager":
                            self._note_ready(now_s, report)
        return failed

    def _note_ready(self, now_s: float, report: StartupReport) -> None:
        start_s = now_s - self._started_s
        if self.has_been_ready:
            report.show_line(f"{self.name} is ready again after {start_s:.1f} s (restart {self.num_restarts})")
        else:
            self._longest_start_s = max(MIN_START_SECONDS, START_FACTOR * start_s)
        self._is_ready, self.has_been_ready, self._alive_s = True, True, now_s
        self.policy.note_ready(now_s)

    def _find_hang(self, now_s: float) -> str | None:
        if not self.children:
            return None
        if self._is_ready and now_s - self._alive_s > self._config.watchdog_seconds + LATE_SECONDS:
            return f"manager gave no sign of life for {now_s - self._alive_s:.0f} s (watchdog_seconds)"
        if not self._is_ready and now_s - self._started_s > self._longest_start_s:
            return f"{self.name} did not start in {self._longest_start_s:.0f} s"
        return None


class WeightHistory:
    """The weights that all replicas have been given since the start; one that is started again gets them too."""

    def __init__(self) -> None:
        self.updates: list[UpdateWeights] = []
        """Updates to apply in order to the checkpoint's weights."""

    def note(self, update: UpdateWeights) -> None:
        """A replica has these weights."""
        if not self.updates or update.number > self.updates[-1].number:  # otherwise another replica had it before
            add_update(self.updates, replace(update, command_id=0))


class RestartPolicy:
    """Counts the consecutive failures of one replica. max_restarts: most restarts that may fail in a row."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_failures = 0
        self._ready_s = math.inf

    def note_ready(self, now_s: float) -> None:
        self._ready_s = now_s

    def note_failure(self, now_s: float) -> float | None:
        """Seconds to wait before the next start: 0, then 1, 2, 4, … None: do not start again."""
        if now_s - self._ready_s >= HEALTHY_SECONDS:
            self._num_failures = 0
        self._ready_s = math.inf
        self._num_failures += 1
        if self._num_failures > self._max_restarts:
            return None
        return 0.0 if self._num_failures == 1 else min(MAX_PAUSE_SECONDS, 2.0 ** (self._num_failures - 2))


def describe_failure(children: list[Child], failed: list[Failed]) -> str | None:
    """The most likely cause among the dead of `children` and what processes reported; None if there is neither.

    A killed process comes first: it is the cause of failures that the others report.
    """
    dead = [child for child in children if not child.process.is_alive()]
    for child in dead:
        child.process.join(DEATH_S)
    causes = [child.describe_death() for child in dead if child.was_killed]
    causes += [f"{message.process} failed: {message.message}" for message in failed]
    causes += [child.describe_death() for child in dead if child.process.exitcode]
    causes += [child.describe_death() for child in dead]
    return causes[0] if causes else None
