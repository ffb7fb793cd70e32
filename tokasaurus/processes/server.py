"""The launcher's view of the server process: starts it, finds out that it died, and starts it again behind the same
port."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokasaurus.messages.commands import Held, NamedAdapter
from tokasaurus.messages.status import (
    STOP_AT_ONCE,
    Failed,
    PhaseDone,
    PhaseProgress,
    Predecessors,
    Ready,
    ServerTotals,
)
from tokasaurus.processes.group import ChildProcess, ProcessGroup
from tokasaurus.processes.replica import ReplicaProcesses, WeightHistory
from tokasaurus.processes.restarts import Restarted, describe_failure

if TYPE_CHECKING:
    from tokasaurus.checkpoint import Checkpoint
    from tokasaurus.config import ServerConfig
    from tokasaurus.startup_report import StartupReport


class ServerProcess(Restarted):
    """The server process. A new one gets new channels to the managers that run, and what those before it left."""

    def __init__(
        self,
        group: ProcessGroup,
        config: ServerConfig,
        checkpoint: Checkpoint,
        entry: str,
        listener: socket.socket,
        replicas: Sequence[ReplicaProcesses],
        weights: WeightHistory,
        adapters: Sequence[NamedAdapter],
        adapters_directory: Path | None,
    ) -> None:
        """listener: stays open here, so that clients wait for the next start. adapters: of the flag lora=.
        adapters_directory: see Predecessors; None if none are loaded."""
        super().__init__("the server", group, config.max_restarts)
        self._config = config
        self._checkpoint = checkpoint
        self._entry = entry
        self._listener = listener
        self._replicas = replicas
        self._weights = weights
        self._held = Held(adapters=tuple(adapters))
        self._adapters_directory = "" if adapters_directory is None else str(adapters_directory)
        self._started: float | None = None
        """When the first process started, in seconds since 1970."""
        self._launcher: socket.socket | None = None
        """The launcher's end of the socket to the process."""

    def start(self) -> None:
        self._note_start()
        self.exit_code = 1
        self._started = self._started or time.time()
        self._launcher, server_end = socket.socketpair()
        with server_end:
            for replica in self._replicas:
                replica.connect(self._launcher)
            predecessors = Predecessors(
                self.num_restarts,
                tuple((replica.limits, replica.num_restarts) for replica in self._replicas),
                tuple(self._weights.updates),
                self._held,
                self._started,
                self._adapters_directory,
            )
            description = ChildProcess("server", "toka-server", self._entry)
            arguments = (self._config, self._checkpoint, self._listener, server_end, predecessors)
            self.children = [self._group.start(description, *arguments)]

    def stop(self) -> None:
        super().stop()
        for replica in self._replicas:
            replica.connect(None)
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def find_failure(self, report: StartupReport) -> str | None:
        failed = self.read_status(report)
        if not failed and all(child.process.is_alive() for child in self.children):
            return None
        failed += self.read_status(report)
        return describe_failure(self.children, failed)

    def read_status(self, report: StartupReport) -> list[Failed]:
        """Take its messages; returns the ones that say why it ends."""
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
                    case ServerTotals():
                        report.totals = message
                    case Held():
                        self._held = message
                    case Ready():
                        report.note_ready(message, is_server=True)
                        if self.has_been_ready:
                            report.note_server_restart()
                        self._note_ready(report)
        return failed

    def terminate(self) -> None:
        """Let it finish its open requests and exit."""
        for child in self.children:
            child.process.terminate()

    def stop_at_once(self) -> None:
        """Let it answer its open requests with an error and exit."""
        for child in self.children:
            if child.process.is_alive() and child.process.pid is not None:
                os.kill(child.process.pid, STOP_AT_ONCE)
