"""Start, monitor and stop the server, managers and model workers; none outlives this process."""

import json
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial

from tokasaurus.addresses import bind, listening_at, url_of
from tokasaurus.checkpoint import Checkpoint, resolve_checkpoint
from tokasaurus.checkpoint.cache import cache_directory, expand_home
from tokasaurus.config import ServerConfig
from tokasaurus.files import replace_text
from tokasaurus.inherited import NO_DIRECTORY, working_directory
from tokasaurus.messages.channel import wait
from tokasaurus.messages.commands import NamedAdapter
from tokasaurus.messages.sampling import show_changed
from tokasaurus.messages.status import HEARTBEAT_SECONDS, UserError, longest_context
from tokasaurus.model.cpu.build import kernels_built_ahead
from tokasaurus.monitoring.cuda_devices import CudaDevices, cuda_devices
from tokasaurus.monitoring.log_lines import no_status
from tokasaurus.monitoring.log_writer import log_writer, setup_logging
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.monitoring.own_process import set_title
from tokasaurus.monitoring.trace import trace_file
from tokasaurus.processes.feasible import check_devices, check_model
from tokasaurus.processes.group import STOP_NUMBERS, Child, ProcessGroup, StopSignals
from tokasaurus.processes.replica import ReplicaProcesses, WeightHistory
from tokasaurus.processes.replica_places import place_replicas
from tokasaurus.processes.restarts import Restarted
from tokasaurus.processes.server import ServerProcess
from tokasaurus.startup_report import StartupReport
from tokasaurus.workers import max_adapter_rank, num_adapters, num_replicas, num_workers

# Time for a graceful end before SIGTERM: for the server's open requests, and for the engine's current step.
SERVER_GRACE_S = 10.0
ENGINE_GRACE_S = 3.0

_START_TIMES = "start_times.json"
"""File of the cache with the times of the last start's phases, by which the next start says how far it is."""


@dataclass(frozen=True)
class Entries:
    """Entry point of each process, as "module:function"."""

    server: str = "tokasaurus.server.app:run_server"
    manager: str = "tokasaurus.manager.loop:run_manager"
    worker: str = "tokasaurus.model.worker.entry:run_worker"


def serve(
    config: ServerConfig,
    entries: Entries | None = None,
    report: StartupReport | None = None,
) -> int:
    """Serve until a stop signal or a final failure; returns the exit code. Call from the main thread.

    report: None for lines on stderr.

    0: stopped on request. 1: start failed or a process failed; one line on stderr says why. 2: a flag or the model was
    refused.
    """
    set_title("toka", title_of(config))
    setup_logging(config, "launcher", has_terminal=True)
    if report is None:
        report = StartupReport(start_times=read_start_times())
    report.shows_details = config.log_level == "debug" or config.log_format == "json"
    log_writer().show_status(report.rows)
    report.drain_seconds = config.drain_seconds
    old_handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in STOP_NUMBERS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        _check_directory()
        devices = cuda_devices()
        check_devices(config, devices)
        with kernels_built_ahead(config, report.show_beginning, report.show_kernels):
            return _serve(config, entries or Entries(), report, devices)
    except KeyboardInterrupt:  # before there are other processes
        report.show_line("stopped before the start was complete", {"event": "stopped"})
        return 0
    except UserError as error:
        report.show_failure(str(error))
        return error.exit_code
    finally:
        log_writer().show_status(no_status)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


class NoDirectory(UserError):
    """The working directory is deleted."""

    exit_code = 2


def _check_directory() -> None:
    """Raises NoDirectory."""
    if working_directory() is None:
        raise NoDirectory(NO_DIRECTORY)


def title_of(config: ServerConfig) -> str:
    """The command, without what must not be seen by other users. `toka ps` reads it."""
    socket_or_port = f"port={config.port}" if config.unix_socket is None else f"unix_socket={config.unix_socket}"
    return f"toka model={config.model or 'demo'} {socket_or_port}"


def _serve(config: ServerConfig, entries: Entries, report: StartupReport, devices: CudaDevices | None) -> int:
    # The port first: if it is taken, this fails before the model is loaded.
    with _bound(config) as listener, trace_file(config.trace):
        report.end_phase("imports")
        report.begin_phase("find model")
        report.address = url_of(listener)
        checkpoint = resolve_checkpoint(
            config.model,
            config.tokenizer,
            report.show_progress,
            report.show_amount,
            rope_scaling=config.rope_scaling,
            impl=config.model_impl,
            task=config.task,
            trust_remote_code=config.trust_remote_code,
            check=lambda info: check_model(config, info, devices),
            applies_sampling=config.sampling_defaults != "neutral" and not config.rl,
        )
        report.end_phase("find model", str(checkpoint.directory))
        report.model = checkpoint.name if config.served_model_name is None else config.served_model_name
        report.task = "generate" if checkpoint.info.pooling is None else checkpoint.info.pooling.task
        report.context_length = longest_context(checkpoint.info.context_length, config.max_num_tokens_per_request)
        if not checkpoint.info.is_native:
            report.show_detail("layers", f"{checkpoint.info.family} is computed by transformers' class")
        for rope in checkpoint.info.spec.rotary[:1]:
            if note := rope.note(report.context_length):
                report.show_detail("rotary", note)
        if sampling := show_changed(checkpoint.default_sampling):
            report.show_detail("sampling", f"{sampling}, the model's defaults (sampling_defaults=neutral)")
        replicas = place_replicas(config, checkpoint, devices)
        config = copy(config)
        config.dp_size = report.num_replicas = len(replicas.places)
        if num_workers(config) > 1:
            report.show_detail("mesh", describe_mesh(config))
        if replicas.note:
            report.show_detail("memory nodes", replicas.note)
        with StopSignals() as stop_signals, ProcessGroup() as group:
            processes = _start_all(group, config, checkpoint, listener, entries, replicas.places)
            for child in group.children:
                report.begin_process(child.description.label)
            failure = _watch(processes, stop_signals, report)
            listener.close()  # only the server's copy may stay open: clients must not wait for one that ends
            if report.is_ready:
                write_start_times(report.start_times)
            if failure is not None:
                was_killed = any(child.was_killed for child in group.children)
                processes.server.stop_at_once()  # first, so that open requests get an answer instead of a reset
                group.join(processes.server.children, SERVER_GRACE_S, stop_signals)
                group.terminate(stop_signals)
                group.finish_logs()
                report.show_failure(failure, was_killed)  # last, after the final log lines of the other processes
                return max(one.exit_code for one in (processes.server, *processes.replicas))
            group.on_second_signal = partial(
                report.show_line, "killing: open requests get no answer", {"event": "killing"}
            )
            report.show_stopping()
            if report.is_ready:
                _end_in_order(group, processes, stop_signals, config.drain_seconds)
            group.terminate(stop_signals)
            group.finish_logs()
            processes.server.read_status(report)
            report.show_summary()
            report.show_line("stopped", {"event": "stopped"})
            return 0


def _bound(config: ServerConfig) -> AbstractContextManager[socket.socket]:
    """The socket that the flags name. Raises UserError."""
    if config.unix_socket is not None:
        return listening_at(expand_home("unix_socket", config.unix_socket))
    return bind(config.host, config.port)


@dataclass(frozen=True)
class _Processes:
    """All processes: one server, and the managers and workers of each replica."""

    server: ServerProcess
    replicas: list[ReplicaProcesses]

    @property
    def managers_and_workers(self) -> list[Child]:
        return [child for replica in self.replicas for child in replica.children]


def describe_mesh(config: ServerConfig) -> str:
    """How many model workers there are, and why, for the user."""
    counts = [(num_replicas(config), "replica"), (config.tp_size, "tensor-parallel rank")]
    if config.pp_size > 1:
        counts.insert(1, (config.pp_size, "pipeline stage"))
    factors = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts]
    return f"{' x '.join(factors)} = {num_workers(config)} model workers"


def _start_all(
    group: ProcessGroup,
    config: ServerConfig,
    checkpoint: Checkpoint,
    listener: socket.socket,
    entries: Entries,
    places: list[Place | None],
) -> _Processes:
    weights, copies = WeightHistory(), group.new_path() if num_adapters(config) else None
    adapters: tuple[NamedAdapter, ...] = ()
    if config.lora and copies is not None:
        from tokasaurus.processes.named_adapters import copy_named  # imports NumPy, which would delay other starts

        adapters = copy_named(config.lora, copies, max_adapter_rank(config))
    replicas = [
        ReplicaProcesses(index, group, config, checkpoint, entries.manager, entries.worker, weights, place)
        for index, place in enumerate(places)
    ]
    for replica in replicas:
        replica.start()
    server = ServerProcess(group, config, checkpoint, entries.server, listener, replicas, weights, adapters, copies)
    server.start()
    return _Processes(server, replicas)


def _watch(processes: _Processes, stop_signals: StopSignals, report: StartupReport) -> str | None:
    """Wait for a stop signal or a final failure: None for a signal, else one line that names the failed process.

    The server, or a replica, that fails after it has once been ready is started again. A replica that fails too often
    is given up, which is final only if no other is left.
    """
    watched: list[Restarted] = [processes.server, *processes.replicas]
    while True:
        children = [child for one in watched for child in one.children]
        waitables = [waitable for child in children for waitable in (child.process.sentinel, child.status)]
        wait([stop_signals.reader, *waitables], _seconds_to_look(watched))
        if stop_signals.take():
            return None
        failures = [one.find_failure(report) for one in watched]
        for one, failure in zip(watched, failures, strict=True):
            final = None if failure is None else _handle_failure(one, failure, report)
            if final is None and one.restart_at_s is not None and time.monotonic() >= one.restart_at_s:
                final = _start_again(one, report)
            if final is not None and (
                not isinstance(one, ReplicaProcesses) or not _give_up(one, processes.replicas, final, report)
            ):
                return final


def _seconds_to_look(watched: list[Restarted]) -> float:
    """Seconds until one of them must be started or looked at."""
    restarts_s = [one.restart_at_s for one in watched if one.restart_at_s is not None]
    return min([HEARTBEAT_SECONDS, *(max(0.0, restart_s - time.monotonic()) for restart_s in restarts_s)])


def _start_again(failed: Restarted, report: StartupReport) -> str | None:
    """If it will not be started any more: one line that says why."""
    try:
        failed.start()
    except OSError as error:  # no memory, processes or files
        return _handle_failure(failed, f"{failed.name} cannot be started: {error.strerror}", report)
    return None


def _handle_failure(failed: Restarted, failure: str, report: StartupReport) -> str | None:
    """Plan the next start. If there is none: one line that says why."""
    if not failed.has_been_ready:
        return failure
    pause_s = failed.policy.note_failure(time.monotonic())
    if pause_s is None:
        return f"{failure}; {failed.name} has failed too often (max_restarts)"
    failed.num_restarts += 1
    when = "now" if pause_s == 0 else f"in {pause_s:g} s"
    report.show_line(f"toka: {failure}; restart {failed.num_restarts} of {failed.name} {when}")
    failed.stop()
    failed.restart_at_s = time.monotonic() + pause_s
    return None


def _give_up(replica: ReplicaProcesses, replicas: list[ReplicaProcesses], failure: str, report: StartupReport) -> bool:
    """Gives the replica up for good. Returns False if it was never ready, or if no other is left."""
    replica.is_given_up = True
    num_left = sum(not other.is_given_up for other in replicas)
    if num_left == 0 or not replica.has_been_ready:
        return False
    replica.stop()
    replica.restart_at_s = None
    report.show_line(f"toka: {failure}; {num_left} of {len(replicas)} replicas go on")
    return True


def _drain(group: ProcessGroup, processes: _Processes, stop_signals: StopSignals, drain_s: float) -> None:
    """Let the server finish its open requests and exit. If all replicas die meanwhile, they cannot finish."""
    server = processes.server
    server.terminate()
    deadline = time.monotonic() + drain_s + SERVER_GRACE_S
    is_stopping, intact = False, processes.replicas
    while server.is_intact and (seconds := deadline - time.monotonic()) > 0:
        intact = [replica for replica in intact if replica.is_intact]
        if not intact and not is_stopping:
            server.stop_at_once()
            is_stopping = True
        others = [child.process.sentinel for one in (server, *intact) for child in one.children]
        wait([stop_signals.reader, *others], seconds)
        if stop_signals.take():
            group.kill_at_once()


def _end_in_order(group: ProcessGroup, processes: _Processes, stop_signals: StopSignals, drain_s: float) -> None:
    """Stop the server, then each manager, whose end ends its workers."""
    _drain(group, processes, stop_signals, drain_s)
    for child in processes.server.children:
        child.process.kill()
    for replica in processes.replicas:
        replica.end()
    group.join(processes.managers_and_workers, ENGINE_GRACE_S, stop_signals)


def read_start_times() -> dict[str, float]:
    """Seconds of the phases of the last start, by name; empty if they are not known."""
    try:
        found = json.loads((cache_directory() / _START_TIMES).read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, UserError):  # none, or damaged
        return {}


def write_start_times(times: Mapping[str, float]) -> None:
    """Nothing happens if that is impossible."""
    with suppress(OSError, UserError):
        replace_text(cache_directory() / _START_TIMES, json.dumps(times, indent=1) + "\n")
