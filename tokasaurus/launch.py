"""Start, monitor and stop the server, managers and model workers; none outlives this process."""

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokasaurus.checkpoint import Checkpoint, resolve_checkpoint
from tokasaurus.child_process import ChildProcess
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import Channel, wait
from tokasaurus.messages.lifecycle import STOP_AT_ONCE, EngineLimits, Failed, PhaseDone, Ready, Shutdown, UserError
from tokasaurus.model.cpu.build_ahead import kernels_built_ahead
from tokasaurus.monitoring.log_setup import setup_logging
from tokasaurus.process_group import DEATH_S, STOP_NUMBERS, Child, ProcessGroup, StopSignals

if TYPE_CHECKING:  # these import NumPy, which would delay the start of the other processes
    from tokasaurus.messages.forward import EndOfInputs, ForwardInput, ForwardOutput
    from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest

# Time for a graceful end before SIGTERM: for the server's open requests, and for the engine's current step.
SERVER_GRACE_S = 3.0
ENGINE_GRACE_S = 3.0


@dataclass(frozen=True)
class Entries:
    """Entry point of each process, as "module:function"."""

    server: str = "tokasaurus.server.app:run_server"
    manager: str = "tokasaurus.manager.loop:run_manager"
    worker: str = "tokasaurus.model.worker.entry:run_worker"


def serve(config: ServerConfig, entries: Entries | None = None) -> int:
    """Serve until a stop signal or the death of a process; returns the exit code. Call from the main thread.

    0: stopped on request. 1: start failed or a process failed; one line on stderr says why.
    """
    startup = _Startup()
    setup_logging(config, "launcher")
    old_handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in STOP_NUMBERS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        with kernels_built_ahead(config, startup.show_progress):
            return _serve(config, Entries() if entries is None else entries, startup)
    except KeyboardInterrupt:  # while the checkpoint was being fetched
        return 0
    except UserError as error:
        _print(f"toka: {error}")
        return 1
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _serve(config: ServerConfig, entries: Entries, startup: "_Startup") -> int:
    with _bind(config.host, config.port) as listener:  # first: fails before the model is loaded if the port is taken
        startup.end_phase("imports")
        startup.address = _url(listener)
        checkpoint = resolve_checkpoint(config.model, config.tokenizer, startup.show_progress)
        startup.end_phase("find model", str(checkpoint.directory))
        startup.model = checkpoint.name if config.served_model_name is None else config.served_model_name
        with StopSignals() as stop_signals, ProcessGroup() as group:
            engine = _start_all(group, config, checkpoint, listener, entries)
            listener.close()  # only the server's copy may stay open: clients must not wait for a dead server
            failure = _watch(group, engine.server, stop_signals, startup)
            if failure is not None:
                _stop_at_once(engine.server)  # first, so that open requests get an answer instead of a reset
                group.join([engine.server], SERVER_GRACE_S, stop_signals)
                group.terminate(stop_signals)
                _print(f"toka: {failure}")  # last, after the final log lines of the other processes
                return 1
            _print(f"stopping: open requests may take {config.drain_seconds} s to finish; Ctrl-C again kills")
            if startup.is_ready:
                _end_in_order(group, engine, stop_signals, config.drain_seconds)
            group.terminate(stop_signals)
            _print("stopped")
            return 0


@dataclass(frozen=True)
class _Replica:
    """Channels between the server, the manager of one replica, and its workers."""

    requests: "Channel[GenerateRequest | CancelRequest | Shutdown]"
    updates: "Channel[EngineUpdate | Ready]"
    inputs: "list[Channel[ForwardInput | EndOfInputs]]"
    outputs: "Channel[ForwardOutput | Ready]"


@dataclass(frozen=True)
class _Engine:
    """All processes and channels: one server, and the managers and workers of each replica."""

    server: Child
    replicas: list[_Replica]
    managers_and_workers: list[Child]


def _start_of_process() -> float:
    """Approximate start of this process by time.perf_counter(), from its CPU time: it has hardly waited so far."""
    return time.perf_counter() - time.process_time()


@dataclass
class _Startup:
    """Prints each start-up phase as it ends, then the ready line with the phases of all processes.

    The ready line is printed once the server is up and the KV cache size is known, which may happen in either order.
    The phases of one process are sequential; the other processes run in parallel after the launcher's own phases.
    """

    address: str = ""
    model: str = ""
    started: float = field(default_factory=_start_of_process)
    limits: EngineLimits | None = None
    is_server_up: bool = False
    is_ready: bool = False

    def __post_init__(self) -> None:
        self._phases: dict[str, list[PhaseDone]] = {}
        self._last_end = self.started

    def show_progress(self, line: str) -> None:
        _print(f"{'toka':>12}  {line} ...")

    def end_phase(self, name: str, detail: str = "") -> None:
        """End a phase of the launcher process."""
        began, self._last_end = self._last_end, time.perf_counter()
        self.show_phase("toka", PhaseDone("toka", name, self._last_end - began, detail))

    def show_phase(self, process: str, phase: PhaseDone) -> None:
        self._phases.setdefault(process, []).append(phase)
        _print(f"{phase.process:>12}  {phase.phase:<16} {phase.seconds:6.2f} s  {phase.detail}".rstrip())

    def note_ready(self, message: Ready, is_server: bool) -> None:
        self.limits = self.limits if message.limits is None else message.limits
        self.is_server_up = self.is_server_up or is_server
        if self.is_server_up and self.limits is not None and not self.is_ready:
            self.is_ready = True
            self._show_ready(self.limits)

    def _show_ready(self, limits: EngineLimits) -> None:
        num_tokens = limits.num_kv_blocks * limits.page_size
        times = [
            f"{process} {sum(phase.seconds for phase in phases):.1f} s "
            f"({', '.join(f'{phase.phase} {phase.seconds:.1f}' for phase in phases)})"
            for process, phases in self._phases.items()
        ]
        _print(
            f"ready: {self.address} serves {self.model}; "
            f"KV cache {num_tokens:,} tokens in {limits.num_kv_blocks:,} blocks of {limits.page_size}; "
            f"{', '.join(times)}; {time.perf_counter() - self.started:.1f} s in all"
        )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"host={host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"port={port}: cannot listen on {host}: {error.strerror}; choose another port=") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _start_all(
    group: ProcessGroup, config: ServerConfig, checkpoint: Checkpoint, listener: socket.socket, entries: Entries
) -> _Engine:
    """Start all processes, workers first because they take longest."""
    replicas: list[_Replica] = []
    managers_and_workers: list[Child] = []
    for _ in range(config.dp_size):
        replica = _Replica(
            requests=Channel(group.context),
            updates=Channel(group.context),
            inputs=[Channel(group.context) for _ in range(config.pp_size * config.tp_size)],
            outputs=Channel(group.context),
        )
        replica.requests.abandon()  # an unread Shutdown to a dead manager must not block exit
        for rank, inputs in enumerate(replica.inputs):
            worker = ChildProcess(f"model worker (rank {rank})", f"toka-worker-{rank}", entries.worker)
            managers_and_workers.append(group.start(worker, config, checkpoint, rank, inputs, replica.outputs))
        manager = ChildProcess("manager", "toka-manager", entries.manager)
        channels = (replica.requests, replica.updates, replica.inputs, replica.outputs)
        managers_and_workers.append(group.start(manager, config, checkpoint, *channels))
        replicas.append(replica)
    requests = [replica.requests for replica in replicas]
    updates = [replica.updates for replica in replicas]
    server = ChildProcess("server", "toka-server", entries.server)
    return _Engine(
        server=group.start(server, config, checkpoint, listener, requests, updates),
        replicas=replicas,
        managers_and_workers=managers_and_workers,
    )


def _watch(group: ProcessGroup, server: Child, stop_signals: StopSignals, startup: _Startup) -> str | None:
    """Wait for a stop signal or a failure: None for a signal, else one line that names the failed process."""
    waitables = [stop_signals.reader, *(child.process.sentinel for child in group.children)]
    while True:
        ready = wait([*waitables, *(child.status.reader for child in group.children)])
        if stop_signals.take():
            return None
        dead = [child for child in group.children if child.process.sentinel in ready]
        for child in dead:
            child.process.join(DEATH_S)
            # A killed process is the cause of failures that the others report.
            if (child.process.exitcode or 0) < 0:
                return child.describe_death()
        for child in group.children:
            for message in child.status.drain():
                match message:
                    case Failed():
                        return f"{child.description.label} failed: {message.message}"
                    case PhaseDone():
                        startup.show_phase(child.description.label, message)
                    case Ready():
                        startup.note_ready(message, is_server=child is server)
        if dead:
            return dead[0].describe_death()


def _stop_at_once(server: Child) -> None:
    """Let the server answer its open requests with an error and exit."""
    if server.process.is_alive() and server.process.pid is not None:
        os.kill(server.process.pid, STOP_AT_ONCE)


def _drain(group: ProcessGroup, engine: _Engine, stop_signals: StopSignals, drain_s: float) -> None:
    """Let the server finish its open requests and exit. If the engine dies meanwhile, they cannot finish."""
    engine.server.process.terminate()
    deadline = time.monotonic() + drain_s + SERVER_GRACE_S
    server, others = engine.server.process.sentinel, [child.process.sentinel for child in engine.managers_and_workers]
    while engine.server.process.is_alive() and (seconds := deadline - time.monotonic()) > 0:
        ready = wait([stop_signals.reader, server, *others], seconds)
        if stop_signals.take():
            group.kill()
        if any(other in ready for other in others):
            _stop_at_once(engine.server)
            others = []


def _end_in_order(group: ProcessGroup, engine: _Engine, stop_signals: StopSignals, drain_s: float) -> None:
    """Stop the server first, then each manager, which stops its workers."""
    _drain(group, engine, stop_signals, drain_s)
    for replica in engine.replicas:
        replica.requests.send(Shutdown())
    group.join(engine.managers_and_workers, ENGINE_GRACE_S, stop_signals)
    for replica in engine.replicas:
        replica.requests.close(timeout_s=1.0)
