"""Spawned processes: what each runs before its entry, and the launcher's view of them: start, stop and death; and
signals that the launcher can wait for.

Imports little, since every spawned process imports this module.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tokasaurus.inherited import among_pythons_modules
from tokasaurus.messages.channel import Receiver, Sender, make_channel, wait
from tokasaurus.messages.commands import Held
from tokasaurus.messages.status import (
    Alive,
    Failed,
    PhaseDone,
    PhaseProgress,
    Ready,
    ServerTotals,
    UserError,
    first_line,
)
from tokasaurus.monitoring.log_lines import from_relayed
from tokasaurus.monitoring.log_writer import LogWriter, log_writer, setup_logging
from tokasaurus.monitoring.memory_nodes import Place, bound_to
from tokasaurus.monitoring.own_process import kill_with_parent, set_title
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage, hint_at_memory

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

Status = PhaseDone | PhaseProgress | Ready | Held | ServerTotals | Failed | Alive
"""What a process tells the launcher."""

# Time between SIGTERM and SIGKILL.
TERMINATE_GRACE_S = 1.0
# A dying process's sentinel is ready shortly before its exit code; this is the longest wait for the code.
DEATH_S = 1.0
# Longest wait for the end of a killed process.
KILL_S = 10.0
# `timeout` and some supervisors signal the process and then its group: both count as one signal.
SAME_SIGNAL_S = 0.3

STOP_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop the server. SIGHUP only if it is not ignored already, as nohup has it."""

FLUSH_SECONDS = 1.0
"""Longest wait until the launcher has read why this process failed, in seconds."""

_MAX_LINE_BYTES = 1 << 20
"""Most bytes of a line on another process's stderr; a longer one is cut into several."""
_FULL_S = 0.05
"""Pause until the LogWriter is asked again whether it has space."""


@dataclass(frozen=True)
class ChildProcess:
    """What a spawned process is called and what it runs."""

    label: str
    """Shown to the user, such as "model worker (rank 0)"."""
    title: str
    """Shown by `ps`; at most 15 bytes."""
    entry: str
    """"module:function", imported only in the child, so that the launcher never loads the child's dependencies."""
    place: Place | None = None
    """Where it runs, of several memory nodes; None: anywhere."""

    @property
    def log_name(self) -> str:
        """Name of the process in log lines."""
        return self.title.removeprefix("toka-")

    @property
    def kind(self) -> str:
        """The label without the rank."""
        return self.label.partition(" (")[0]


class StopSignals:
    """While entered, the signals `STOP_NUMBERS` only make `reader` readable. Main thread only."""

    def __enter__(self) -> StopSignals:
        self._last_signal_s = -math.inf
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._old_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old_handlers = {
            number: signal.signal(number, self._only_wake_up)
            for number in STOP_NUMBERS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self.reader)
        os.close(self._writer)

    def take(self) -> set[int]:
        """Numbers of the signals since the last call, ignoring any within `SAME_SIGNAL_S` of the previous ones."""
        try:
            numbers = set(os.read(self.reader, 4096))
        except BlockingIOError:
            return set()
        now_s = time.monotonic()
        if now_s - self._last_signal_s < SAME_SIGNAL_S:
            return set()
        self._last_signal_s = now_s
        return numbers

    @staticmethod
    def _only_wake_up(number: int, frame: FrameType | None) -> None:
        """Does nothing: the wake-up descriptor already has the signal's number."""


class LogRelay:
    """Passes what one process writes to stderr on to this process's LogWriter, until its end of the pipe is closed: one
    writer for one terminal.

    Each process has a pipe of its own, so that no line lies in the middle of another one's. If nobody reads stderr,
    this process's LogWriter is full, a pipe fills up, and the other process's LogWriter drops and counts what it cannot
    write.
    """

    def __init__(self, reader: Connection, writer: LogWriter, process: str) -> None:
        """process: its name in lines."""
        self._writer = writer
        self._process = process
        self._thread = threading.Thread(target=self._run, args=(reader,), name=f"log of {process}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is passed on that the process has written. Precondition: it has ended."""
        self._thread.join(timeout_s)

    def _run(self, reader: Connection) -> None:
        with reader, open(reader.fileno(), "rb", closefd=False) as lines:  # a descriptor
            while line := lines.readline(_MAX_LINE_BYTES):
                while self._writer.is_full:
                    time.sleep(_FULL_S)
                text = line.decode(errors="backslashreplace").removesuffix("\n")
                self._writer.put_line(from_relayed(text, self._process))


@dataclass(frozen=True)
class Child:
    """A started process. Each has its own status channel, so that a killed process cannot lock the others' channel."""

    description: ChildProcess
    process: SpawnProcess
    status: Receiver[Status]
    log: LogRelay
    """Relay of the lines that the process writes to stderr."""

    @property
    def was_killed(self) -> bool:
        """A signal has ended it."""
        return (self.process.exitcode or 0) < 0

    def describe_death(self) -> str:
        """One line for the user; call after the process has ended."""
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"{self.description.label} died: killed by signal {-code} ({name}){hint_at_memory(-code)}"
        return f"{self.description.label} died: exit code {code}{hint_at_memory(None)}"


class ProcessGroup:
    """The children, in order of start. Leaving the context kills all that still run."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.children: list[Child] = []
        self.on_second_signal: Callable[[], None] = lambda: None
        """Called when another stop signal kills all children."""
        self._lifeline, self._lifeline_writer = multiprocessing.Pipe(duplex=False)
        self._directory: TemporaryDirectory[str] | None = None
        self._num_paths = 0

    def __enter__(self) -> ProcessGroup:
        with among_pythons_modules():
            resource_tracker.ensure_running()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lifeline.close()
        self._lifeline_writer.close()
        if self._directory is not None:
            self._directory.cleanup()

    def new_path(self) -> Path:
        """A path that nothing else uses, in a directory that is removed when the context is left."""
        if self._directory is None:
            from tempfile import TemporaryDirectory  # takes 10 ms, which most processes need not spend

            self._directory = TemporaryDirectory(prefix="toka-")
        self._num_paths += 1
        return Path(self._directory.name, str(self._num_paths))

    def start(self, description: ChildProcess, config: ServerConfig, *args: Any) -> Child:
        """Spawn a process that runs its entry with (config, *args, status).

        The process gets only the values, so that it need not import Pydra, which takes a fifth of a second."""
        values = cast("ServerConfig", SimpleNamespace(**config.values()))
        receiver: Receiver[Status]
        sender: Sender[Status]
        receiver, sender = make_channel()
        log_reader, log = multiprocessing.Pipe(duplex=False)
        # The child inherits the mask, so that Ctrl-C cannot interrupt its imports. A Ctrl-C during the start is handled
        # after the unblock.
        # The tracker of resources runs already: to run it unblocks the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with among_pythons_modules() as directory:
                process = self.context.Process(
                    target=run_child,
                    name=description.label,
                    args=(
                        *(directory, description, values, time.time(), os.getpid()),
                        *(self._lifeline, log, sender, (values, *args, sender)),
                    ),
                )
                with bound_to(description.place):
                    process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            log.close()
        sender.close()  # from now on it is only in the child
        child = Child(description, process, receiver, LogRelay(log_reader, log_writer(), description.log_name))
        self.children.append(child)
        return child

    def finish_logs(self) -> None:
        """Wait until all is in this process's LogWriter that processes wrote which have ended."""
        deadline = time.monotonic() + FLUSH_SECONDS
        for child in self.children:
            child.log.join(max(0.0, deadline - time.monotonic()))

    def running(self) -> list[Child]:
        return [child for child in self.children if child.process.is_alive()]

    def kill(self) -> None:
        """Send SIGKILL to all running children and wait for their end."""
        self._kill(self.children)

    def kill_at_once(self) -> None:
        """`kill`, since the user asks for it."""
        self.on_second_signal()
        self.kill()

    def remove(self, children: Sequence[Child]) -> None:
        """Kill all `children` that still run, and forget all of them."""
        self._kill(children)
        self.children = [child for child in self.children if child not in children]
        for child in children:
            child.status.close()
            if not child.process.is_alive():
                child.process.close()

    @staticmethod
    def _kill(children: Sequence[Child]) -> None:
        """All at once: a process may take a second to free its memory. One that a driver holds may not end at all."""
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join(KILL_S)

    def terminate(self, stop_signals: StopSignals) -> None:
        """Send SIGTERM to all running children, then SIGKILL after `TERMINATE_GRACE_S`."""
        for child in self.running():
            child.process.terminate()
        self.join(self.children, TERMINATE_GRACE_S, stop_signals)
        self.kill()

    def join(self, children: Sequence[Child], timeout_s: float, stop_signals: StopSignals) -> None:
        """Wait at most `timeout_s` seconds for `children` to end; another stop signal kills the whole group."""
        deadline = time.monotonic() + timeout_s
        left = {child.process.sentinel: child for child in children if child.process.is_alive()}
        while left and (seconds := deadline - time.monotonic()) > 0:
            for ready in wait([stop_signals.reader, *left], seconds):
                if ready == stop_signals.reader and stop_signals.take():
                    self.kill_at_once()
                if isinstance(ready, int) and ready in left:
                    left.pop(ready).process.join(DEATH_S)


def run_child(directory: str | None, child: ChildProcess, *arguments: Any) -> None:
    """Target of a spawned process: `_run`. Without memory, one line in place of a traceback.

    directory: the working directory; None if it is deleted."""
    with suppress(OSError):
        os.chdir(directory or "/")
    try:
        _run(child, *arguments)
    except Exception as error:
        # Where memory is short, a thread may not start, nor a report be sent: there is no traceback for that either.
        shortage = describe_shortage(error, LESS_MEMORY)
        if shortage is None:
            raise
        os.write(2, f"toka: {child.label} failed: {shortage}\n".encode())
        os._exit(1)


def _run(
    child: ChildProcess,
    config: ServerConfig,
    spawned_at: float,
    launcher_pid: int,
    lifeline: Connection,
    log: Connection,
    status: Sender[Status],
    args: tuple[Any, ...],
) -> None:
    """Run the entry with `args`. If it raises, send Failed and exit with code 1, or the code of a UserError.

    spawned_at: by time.time(). lifeline: reading end of a pipe whose only writer is the launcher, which writes nothing.
    log: becomes stderr.
    """
    with log:
        os.dup2(log.fileno(), 2)
    die_with_parent(launcher_pid, lifeline)
    set_title(child.title)
    # A terminal sends Ctrl-C to every process; the launcher decides when each one ends. SIGINT was blocked until here,
    # so that it cannot interrupt the imports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    setup_logging(config, child.log_name, is_relayed=True)
    try:
        entry = _load(child.entry)
        status.send(PhaseDone(child.kind, "imports", time.time() - spawned_at))
        entry(*args)
        if "triton" not in sys.modules:  # whose library would print what it calls leaks
            gc.freeze()  # else the interpreter, at its end, searches all modules and weights for cycles: half a second
    except UserError as error:
        _fail(child, status, str(error), error.exit_code)
    except Exception as error:
        shortage = describe_shortage(error, LESS_MEMORY)
        if shortage is not None:
            _fail(child, status, shortage)
        logger.exception("%s failed", child.label)
        _fail(child, status, f"{type(error).__name__}: {first_line(error)}")


def _load(entry: str) -> Callable[..., None]:
    module, function = entry.split(":")
    loaded: Callable[..., None] = getattr(importlib.import_module(module), function)
    return loaded


def _fail(child: ChildProcess, status: Sender[Status], message: str, exit_code: int = 1) -> None:
    log_writer().flush_lines()  # the launcher's answer to Failed may be SIGKILL
    status.send(Failed(child.label, message, exit_code))
    status.flush(FLUSH_SECONDS)
    sys.exit(exit_code)


def die_with_parent(parent_pid: int, lifeline: Connection) -> None:
    """Ensure that this process ends when its parent dies, even by SIGKILL.

    lifeline: reading end of a pipe whose only writer is the parent, which writes nothing."""
    kill_with_parent()
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)

    def wait_for_end() -> None:
        try:
            lifeline.recv_bytes()
        finally:
            os._exit(1)

    # For systems without prctl, and because child processes do not inherit its setting.
    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
