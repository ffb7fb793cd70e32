"""toka's processes as a program of their own, which belongs to this process: it tells only this one what happens, and
ends with it, however this one ends.

Any thread may start one; nothing of this process's main module runs in it.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tokasaurus.inherited import python_command
from tokasaurus.messages.status import Failed, ServerTotals, Serving
from tokasaurus.monitoring.shortage import hint_at_memory

ENTRY = "tokasaurus.processes.private_entry"
"""Module whose `main` the program runs. Tests name another one."""
# Time for the processes to stop, beside their drain_seconds, before they are killed.
STOP_S = 20.0
# Time for the last of them to end after the launcher.
END_S = 5.0
# With them, the processes would draw spinners and bars into their pipe as into a terminal. Jupyter sets the first one.
_TERMINAL_VARIABLES = ("FORCE_COLOR", "TTY_COMPATIBLE")
_TOLD_BY_COMMAND = "toka: "
"""Begins the line in which a process without a channel says why it ends."""

_lifelines = set[Connection]()
"""This process's ends of the channels to its servers. A forked child must not keep them open."""
_fork_lock = threading.RLock()
"""Held while ends are open that no process but the new server may have: no fork happens meanwhile."""


def _close_in_forked_child() -> None:
    for lifeline in _lifelines:
        lifeline.close()
    _lifelines.clear()
    _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_in_forked_child
)


def _beside_streams(connection: Connection) -> Connection:
    """The connection, whose descriptor is none of the standard streams': this process may have closed those."""
    if connection.fileno() > 2:
        return connection
    with connection:
        return Connection(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _argument(word: str) -> bytes:
    """A word for a program that reads UTF-8: a path that this process has read by another locale keeps its bytes."""
    try:
        return os.fsencode(word)
    except UnicodeEncodeError:
        return word.encode()


class ServerEnded(Exception):
    """The server has ended without being asked to. The message is one line that says why."""

    def __init__(self, why: str, was_killed: bool = False, exit_code: int = 1) -> None:
        """was_killed: a signal has ended it, or one of its processes. exit_code: of a command that needs the server."""
        super().__init__(why)
        self.was_killed = was_killed
        self.exit_code = exit_code


class PrivateServer:
    """One start of the program. Methods other than `stop` belong to one thread at a time."""

    def __init__(
        self,
        words: list[str],
        show: Callable[[str], None],
        *,
        directory: Path | None = None,
        stop_s: float = STOP_S,
        working_directory: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """words: flags, with unix_socket=. show: shows the user a line; another thread calls it for the processes'
        logs. directory: for temporary files; the server removes it if this process dies. stop_s: time for an end in
        order. working_directory, environment: None for this process's own."""
        self._words = words
        self._show = show
        self._directory = directory
        self._stop_s = stop_s
        self._working_directory = working_directory
        inherited = os.environ if environment is None else environment
        self._environment = {name: value for name, value in inherited.items() if name not in _TERMINAL_VARIABLES}
        self._environment["PYTHONUTF8"] = "1"  # paths are read as UTF-8, whatever the locale
        self._failure: Failed | None = None
        """Why the launcher says it ends."""
        self._last_words = ""
        """Why a process says it ends that could not tell the launcher."""
        self._is_stopping = False
        self.model = ""
        """Name of the model that it serves; empty until it is ready."""
        self.kv_cache_tokens = 0
        """Tokens of the KV caches of all its replicas together; 0 until it is ready."""
        self.totals: ServerTotals | None = None
        """What it has done, once it was stopped; None if it was killed."""

    @property
    def pid(self) -> int:
        """Process id of the launcher, which leads a session of its own."""
        return self._process.pid

    def start(self) -> None:
        """Start the program. Raises OSError."""
        command = python_command(f"from {ENTRY} import main; sys.exit(main(*sys.argv[1:]))")
        directory = "" if self._directory is None else str(self._directory)
        with _fork_lock:
            self._messages, its_end = map(_beside_streams, multiprocessing.Pipe())
            _lifelines.add(self._messages)
            try:
                with its_end:
                    self._process = subprocess.Popen(
                        [*map(_argument, (*command, str(its_end.fileno()), directory, *self._words))],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        pass_fds=[its_end.fileno()],
                        start_new_session=True,  # a terminal's Ctrl-C is for this process, which decides what ends
                        cwd=self._working_directory,
                        env=self._environment,
                        text=True,
                        errors="replace",
                    )
                assert self._process.stdout is not None
                self._showing = threading.Thread(target=self._show_lines, args=(self._process.stdout,), daemon=True)
                self._showing.start()
            except BaseException:
                self._close_channel()  # which ends a program that has been started
                raise

    def wait_until_serving(self) -> None:
        """Returns when the model is loaded. Raises ServerEnded."""
        while not self.model:
            self._take_message()

    def wait(self, seconds: float) -> None:
        """Takes messages for so long. Raises ServerEnded."""
        deadline = time.monotonic() + seconds
        while self._messages.poll(max(0.0, deadline - time.monotonic())):
            self._take_message()

    def wait_for_end(self) -> ServerEnded:
        """Takes messages until the server ends."""
        try:
            while True:
                self._take_message()
        except ServerEnded as ended:
            return ended

    def stop(self) -> None:
        """End it, and close what belongs to it: no thread may be waiting for messages."""
        self.end()
        self._showing.join(END_S)
        with suppress(EOFError, OSError):
            while self._messages.poll():
                message = self._messages.recv()
                if isinstance(message, ServerTotals):
                    self.totals = message
        self._close_channel()

    def end(self) -> None:
        """Stop it in order; kill it if that takes too long, or if the user interrupts again."""
        self._is_stopping = True
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._stop_s)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _close_channel(self) -> None:
        _lifelines.discard(self._messages)
        self._messages.close()

    def _take_message(self) -> None:
        """Wait for the next message. Raises ServerEnded."""
        try:
            message = self._messages.recv()
        except (EOFError, OSError):
            raise self._death() from None
        match message:
            case str():
                self._show(message)
            case Serving():
                self.model, self.kv_cache_tokens = message.model, message.kv_cache_tokens
            case Failed():
                self._failure = message

    def _show_lines(self, output: IO[str]) -> None:
        """Until all processes have ended, which have the pipe's other end."""
        with output:
            for text in output:
                line = text.rstrip("\n")
                if line.startswith(_TOLD_BY_COMMAND):
                    self._last_words = line.removeprefix(_TOLD_BY_COMMAND)
                if not self._is_stopping:
                    self._show(line)

    def _death(self) -> ServerEnded:
        """Why the server has ended: in the launcher's last words, if there are any."""
        code = self._process.wait()
        self._showing.join(END_S)
        if self._showing.is_alive():  # so the launcher's group still exists, and no other has its number
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        death = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        death += hint_at_memory(-code if code < 0 else None)
        if self._failure is not None:
            return ServerEnded(self._failure.message, self._failure.was_killed, max(code, 1))
        return ServerEnded(self._last_words or death, was_killed=code < 0)
