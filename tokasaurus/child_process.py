"""Wrapper of every spawned process's entry: it ends with the launcher and reports failures."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tokasaurus.messages.channel import Sender
from tokasaurus.messages.lifecycle import Alive, Failed, PhaseDone, Ready, UserError
from tokasaurus.monitoring.log_writer import log_writer, setup_logging
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

Status = PhaseDone | Ready | Failed | Alive
"""What a process tells the launcher."""

FLUSH_SECONDS = 1.0
"""Longest wait until the launcher has read why this process failed, in seconds."""

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class ChildProcess:
    """What a spawned process is called and what it runs."""

    label: str
    """Shown to the user, such as "model worker (rank 0)"."""
    title: str
    """Shown by `ps`; at most 15 bytes."""
    entry: str
    """"module:function", imported only in the child, so that the launcher never loads the child's dependencies."""

    @property
    def kind(self) -> str:
        """The label without the rank."""
        return self.label.partition(" (")[0]


def run_child(
    child: ChildProcess,
    config: ServerConfig,
    spawned_at: float,
    launcher_pid: int,
    lifeline: Connection,
    status: Sender[Status],
    args: tuple[Any, ...],
) -> None:
    """Target of a spawned process: run the entry with `args`. If it raises, send Failed and exit with code 1, or
    the code of a UserError.

    spawned_at: by time.time(). lifeline: reading end of a pipe whose only writer is the launcher, which writes nothing.
    """
    try:
        _run(child, config, spawned_at, launcher_pid, lifeline, status, args)
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
    status: Sender[Status],
    args: tuple[Any, ...],
) -> None:
    die_with_parent(launcher_pid, lifeline)
    _set_title(child.title)
    # A terminal sends Ctrl-C to every process; the launcher decides when each one ends. SIGINT was blocked until here,
    # so that it cannot interrupt the imports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    setup_logging(config, child.title.removeprefix("toka-"))
    try:
        entry = _load(child.entry)
        status.send(PhaseDone(child.kind, "imports", time.time() - spawned_at))
        entry(*args)
        gc.freeze()  # else the interpreter, at its end, searches all modules and weights for cycles: half a second
    except UserError as error:
        _fail(child, status, str(error), error.exit_code)
    except Exception as error:
        shortage = describe_shortage(error, LESS_MEMORY)
        if shortage is not None:
            _fail(child, status, shortage)
        logger.exception("%s failed", child.label)
        first_line, *_ = [*str(error).splitlines(), ""]
        _fail(child, status, f"{type(error).__name__}: {first_line}")


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
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)

    def wait_for_end() -> None:
        try:
            lifeline.recv_bytes()
        finally:
            os._exit(1)

    # For systems without prctl, and because child processes do not inherit its setting.
    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()


def _set_title(title: str) -> None:
    _prctl(_PR_SET_NAME, title.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
