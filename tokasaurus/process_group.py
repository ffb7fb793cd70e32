"""The launcher's view of the spawned processes: start, stop and death; and signals that it can wait for."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tokasaurus.child_process import ChildProcess, Status, run_child
from tokasaurus.messages.channel import Receiver, Sender, make_channel, wait
from tokasaurus.monitoring.shortage import hint_at_memory

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

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


@dataclass(frozen=True)
class Child:
    """A started process. Each has its own status channel, so that a killed process cannot lock the others' channel."""

    description: ChildProcess
    process: SpawnProcess
    status: Receiver[Status]

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
        self._lifeline, self._lifeline_writer = multiprocessing.Pipe(duplex=False)
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._num_paths = 0

    def __enter__(self) -> ProcessGroup:
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
            self._directory = tempfile.TemporaryDirectory(prefix="toka-")
        self._num_paths += 1
        return Path(self._directory.name, str(self._num_paths))

    def start(self, description: ChildProcess, config: ServerConfig, *args: Any) -> Child:
        """Spawn a process that runs its entry with (config, *args, status).

        The process gets only the config's values, so that it need not import Pydra, which takes a fifth of a second."""
        values = cast("ServerConfig", SimpleNamespace(**vars(config)))
        receiver: Receiver[Status]
        sender: Sender[Status]
        receiver, sender = make_channel()
        process = self.context.Process(
            target=run_child,
            name=description.label,
            args=(description, values, time.time(), os.getpid(), self._lifeline, sender, (values, *args, sender)),
        )
        # The child inherits the mask, so that Ctrl-C cannot interrupt its imports. A Ctrl-C during the start is handled
        # after the unblock.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        sender.close()  # from now on it is only in the child
        child = Child(description, process, receiver)
        self.children.append(child)
        return child

    def running(self) -> list[Child]:
        return [child for child in self.children if child.process.is_alive()]

    def kill(self) -> None:
        """Send SIGKILL to all running children and wait for their end."""
        self._kill(self.children)

    def remove(self, children: Sequence[Child]) -> None:
        """Kill those of `children` that still run, and forget all of them."""
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
                    self.kill()
                if isinstance(ready, int) and ready in left:
                    left.pop(ready).process.join(DEATH_S)
