"""The launcher's view of one replica: starts its manager and model workers, finds out that one died or hangs, and
decides when to start it again."""

from __future__ import annotations

import math
import socket
import time
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from tokasaurus.messages.channel import Receiver, Sender, make_channel, make_connection, send_connection
from tokasaurus.messages.commands import add_update
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import (
    HEARTBEAT_SECONDS,
    Alive,
    EngineLimits,
    Failed,
    PhaseDone,
    PhaseProgress,
    Ready,
    WeightsChanged,
)
from tokasaurus.processes.group import ChildProcess, ProcessGroup
from tokasaurus.processes.restarts import Restarted, describe_failure
from tokasaurus.workers import num_replicas

if TYPE_CHECKING:  # these import NumPy, which would delay the start of the other processes
    from tokasaurus.checkpoint import Checkpoint
    from tokasaurus.config import ServerConfig
    from tokasaurus.messages.commands import CommandDone, UpdateWeights, WorkerCommand
    from tokasaurus.messages.forward import ForwardInput, ForwardOutput
    from tokasaurus.monitoring.memory_nodes import Place
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


class ReplicaProcesses(Restarted):
    """The manager and the workers of one replica."""

    def __init__(
        self,
        index: int,
        group: ProcessGroup,
        config: ServerConfig,
        checkpoint: Checkpoint,
        manager_entry: str,
        worker_entry: str,
        weights: WeightHistory,
        place: Place | None = None,
    ) -> None:
        name = "the engine" if num_replicas(config) == 1 else f"replica {index}"
        super().__init__(name, group, config.max_restarts)
        self.is_given_up = False
        """It has failed too often and is not started again, while other replicas go on."""
        self.limits: EngineLimits | None = None
        """What its manager reported at its last start."""
        self._number = "" if num_replicas(config) == 1 else f" {index}"  # in the names of its processes
        self._index = index
        self._config = config
        self._checkpoint = checkpoint
        self._weights = weights
        self._place = place
        self._manager_entry = manager_entry
        self._worker_entry = worker_entry
        self._server: socket.socket | None = None
        """Hands channels to the server; None while it does not run."""
        self._manager: socket.socket | None = None
        """Hands channels to the manager; None while it does not run."""
        self._is_ready = False
        self._alive_s = self._looked_s = self._started_s
        self._longest_start_s = math.inf

    def start(self) -> None:
        """Start all processes, workers first because they take longest, and connect them with a server that runs."""
        config = self._config
        if self.num_restarts:  # its steps have the same numbers again, so that nobody could tell them apart in a trace
            config = copy(config)
            config.trace = None
        outputs: Receiver[ForwardOutput | Ready | CommandDone]
        outputs_out: Sender[ForwardOutput | Ready | CommandDone]
        outputs, outputs_out = make_channel()
        self._manager, manager_end = socket.socketpair()
        checkpoint = self._checkpoint
        if self._weights.updates:
            checkpoint = replace(checkpoint, weight_updates=tuple(self._weights.updates))
        self._note_start()
        self._alive_s = self._looked_s = self._started_s
        self._is_ready, self.exit_code = False, 1
        inputs: list[Sender[ForwardInput | WorkerCommand]] = []
        num_workers = config.pp_size * config.tp_size
        rendezvous = self._group.new_path() if num_workers > 1 else None
        stages = StageBoard(config.pp_size) if config.pp_size > 1 else None
        for rank in range(num_workers):
            input_in: Receiver[ForwardInput | WorkerCommand]
            input_out: Sender[ForwardInput | WorkerCommand]
            input_in, input_out = make_channel()
            label, title = f"model worker{self._number} (rank {rank})", f"toka-worker{self._number.strip()}-{rank}"
            worker = ChildProcess(label, title, self._worker_entry, self._place)
            index = self._index * num_workers + rank
            arguments = config, checkpoint, index, self._place, rendezvous, input_in, outputs_out, stages
            self.children.append(self._group.start(worker, *arguments))
            input_in.close()
            inputs.append(input_out)
        title = f"toka-manager{self._number.strip()}"
        manager = ChildProcess(f"manager{self._number}", title, self._manager_entry, self._place)
        channels = (manager_end, inputs, outputs, stages)
        self.children.append(self._group.start(manager, config, checkpoint, self._index, *channels))
        # The ends belong to the processes now: a copy here would keep a channel open after its process has died.
        manager_end.close()
        outputs.close()
        outputs_out.close()
        for sender in inputs:
            sender.close()
        self.connect(self._server)

    def connect(self, server: socket.socket | None) -> None:
        """Give the manager, if it runs, and the server new channels to each other.

        server: the launcher's end of the socket to it; None if it has died. Raises OSError if there are no files left.
        """
        self._server = server
        if server is None or self._manager is None:
            return
        of_server, of_manager = make_connection()
        try:
            send_connection(self._manager, self._index, of_manager)
            send_connection(server, self._index, of_server)
        except OSError:  # one of them has just died, which is seen next
            of_manager.close()
            of_server.close()

    def end(self) -> None:
        """Let the manager end in order, and then its workers. No server may be running."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def stop(self) -> None:
        super().stop()
        self.end()

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
                            self.limits = message.limits
                            self._note_ready(report)
        return failed

    def _note_ready(self, report: StartupReport) -> None:
        if not self.has_been_ready:
            seconds = time.monotonic() - self._started_s
            self._longest_start_s = max(MIN_START_SECONDS, START_FACTOR * seconds)
        super()._note_ready(report)
        self._is_ready, self._alive_s = True, time.monotonic()

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
