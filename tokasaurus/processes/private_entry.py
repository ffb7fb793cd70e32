"""What a private server runs first: it ends with the process that has started it, and tells it what happens.

`PrivateServer` runs its `main`, in a program of its own.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage, ends_in_one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tokasaurus.startup_report import StartupReport

LOCK = "lock"
"""File in a private server's directory, which it and its parent lock together."""
# Longest time for the removal of the directory.
_REMOVE_S = 1.0
# Longest time for all that is done when the parent has ended, on a machine without a processor to spare.
_ORPHAN_S = 60.0


@ends_in_one_line
def main(channel_fd: str, directory: str, *words: str) -> int:
    """Serve on unix_socket until a signal; returns the exit code.

    directory: for temporary files; removed if the parent dies. "" if there is none. words: flags."""
    from multiprocessing.connection import Connection

    # The parent may ignore or block signals, and a new program inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    channel = Connection(int(channel_fd))
    os.set_inheritable(int(channel_fd), False)
    lifeline = end_with_parent(channel, directory)
    if directory:
        lock_file(Path(directory))
    from tokasaurus.messages.status import Failed

    try:
        if directory:
            import tempfile

            tempfile.tempdir = directory
        from tokasaurus.config import ServerConfig
        from tokasaurus.flags import FlagError
        from tokasaurus.processes.launch import serve

        try:
            config = ServerConfig.parse([*words])
        except FlagError as error:
            channel.send(Failed("launcher", str(error)))
            return 2
        return serve(config, report=_report_to(channel))
    except Exception as error:
        shortage = describe_shortage(error, LESS_MEMORY)
        if shortage is None:
            raise
        channel.send(Failed("launcher", shortage))
        return 1
    finally:
        # What fails here may be the first sign of the parent's end, such as a report that nobody receives.
        if _has_hung_up(channel):
            lifeline.join(_ORPHAN_S)  # it ends this process


def end_with_parent(channel: Connection, directory: str) -> threading.Thread:
    """When the parent ends, even by SIGKILL: kill all that this process has started, remove `directory`, and end.

    Returns the thread that waits for it.

    channel: its other end is open in the parent alone. Unlike the kernel's signal for a parent's death, which comes at
    the end of the thread that has started this process, the end of a channel comes at the end of the parent."""

    def wait_for_end() -> None:
        try:
            while True:
                channel.recv_bytes()
        except (EOFError, OSError):
            _kill_descendants()
            if directory:
                _remove(Path(directory))
            with suppress(OSError):
                os.killpg(os.getpid(), signal.SIGKILL)  # and what was started meanwhile
            os._exit(1)

    lifeline = threading.Thread(target=wait_for_end, name="lifeline", daemon=True)
    lifeline.start()
    return lifeline


def _has_hung_up(channel: Connection) -> bool:
    """Whether the other end is closed, whether or not a thread has read that."""
    poll = select.poll()
    poll.register(channel.fileno(), 0)  # the end is always reported
    return len(poll.poll(0)) > 0


def lock_file(directory: Path) -> int:
    """A descriptor of the directory's file LOCK: while any process has one, the directory is in use. Raises OSError."""
    descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CREAT, 0o600)
    with suppress(OSError):  # file systems without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _kill_descendants() -> None:
    """Kill all processes below this one, those in sessions of their own, such as compilers, included."""
    with suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()


def _remove(directory: Path) -> None:
    """Again and again for a moment: a process that has just been killed may still create a file."""
    deadline = time.monotonic() + _REMOVE_S
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.001)


def _report_to(channel: Connection) -> StartupReport:
    """Sends what the parent must know, and lines for the user as plain strings."""
    from tokasaurus.messages.status import Failed, PhaseDone, Ready, Serving
    from tokasaurus.startup_report import StartupReport

    class Report(StartupReport):
        def show_line(self, line: str, fields: dict[str, Any] | None = None, indent: int = 0) -> None:
            del fields, indent
            channel.send(line)

        def show_hints(self, address: str) -> None:
            """None: only the parent uses this server."""

        def show_failure(self, failure: str, was_killed: bool = False) -> None:
            channel.send(Failed("launcher", failure, was_killed=was_killed))

        def show_phase(self, process: str, phase: PhaseDone) -> None:
            if not self.is_ready:  # the chat template, which may be loaded later
                super().show_phase(process, phase)

        def note_ready(self, message: Ready, is_server: bool) -> None:
            was_ready = self.is_ready
            super().note_ready(message, is_server)
            if self.is_ready and not was_ready:
                assert self.limits is not None, "a replica is ready"
                tokens = self.limits.num_kv_tokens * self.num_replicas
                channel.send(Serving(self.model, tokens))

        def show_summary(self) -> None:
            if self.totals is not None:
                channel.send(self.totals)

    return Report()
