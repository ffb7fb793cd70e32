"""The processes behind an `LLM`: toka on a Unix socket in a private directory, started again when they die, and ended
with the program that uses them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokasaurus.addresses import MAX_SOCKET_PATH_BYTES
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagError
from tokasaurus.messages.status import UserError
from tokasaurus.monitoring.shortage import describe_shortage
from tokasaurus.processes.private_entry import LOCK, lock_file
from tokasaurus.processes.private_server import PrivateServer, ServerEnded

MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
"""More than MAX_RESTARTS within this time are too many."""

_STOP_S = 1.0
"""Time for the processes to end in order, beside drain_seconds. They have nothing to store, but for a trace."""
_STOP_WITH_TRACE_S = 5.0
_LOOK_S = 0.1
"""Time between two attempts to connect: a dead server is noticed a moment before its launcher has ended."""
_ABANDONED_S = 60.0
"""A directory without a lock may be so new that its engine has not locked it yet, in seconds."""
_PREFIX = "toka-engine-"
SOCKET_NAME = "socket"
"""Name of the server's socket in its private directory."""
_ROOM_BYTES = len(f"/{_PREFIX}12345678/{SOCKET_NAME}")


class EngineError(UserError):
    """The processes did not start, or have died for good. The message is one line that says why."""

    def __init__(self, why: str, exit_code: int = 1) -> None:
        """exit_code: of a command that needs them: 2 if they have refused a flag or the model."""
        super().__init__(why)
        self.exit_code = exit_code


class EngineNotUp(EngineError):
    """It does not serve yet, but may later."""


class _KilledAtStart(EngineError):
    """Somebody, or the system, has killed it while it started."""


class PrivateEngine:
    """toka's processes, for this process alone. Any thread may call any method.

    They end with `close`, at the end of this process, however it ends, or when nothing refers to the engine any more.
    A forked child may send requests to them; it cannot end them."""

    def __init__(self, words: list[str], show: Callable[[str], None]) -> None:
        """words: flags of `toka` as name=value, already checked. show: shows the user a line; threads call it."""
        self._supervisor = _Supervisor(words, show)
        # not a method of this object, which would then be referred to for ever; also called at the interpreter's end
        self._close = weakref.finalize(self, self._supervisor.close)

    def start(self) -> None:
        """Returns when the model is loaded and requests are served. Raises EngineError."""
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait, after a lost connection, until requests are served again.

        Raises EngineNotUp if they are not after `timeout_s` seconds, and EngineError if they will not be any more."""
        self._supervisor.wait_until_up(timeout_s)

    def check(self) -> None:
        """Raises EngineError if it will not be started again, whether it is up at the moment or not."""
        self._supervisor.check()

    @property
    def socket_path(self) -> str:
        """File of the Unix socket; it stays the same after a restart."""
        return self._supervisor.socket_path

    @property
    def model(self) -> str:
        """Name of the model that is served."""
        return self._supervisor.model

    def close(self) -> None:
        """End all processes and remove the directory. May be called again."""
        self._close()


class _Supervisor:
    """What the watching thread needs; it does not refer to the engine, so that an engine nobody uses is closed."""

    def __init__(self, words: list[str], show: Callable[[str], None]) -> None:
        self._words = words
        self._show_line = show
        self._owner_pid = os.getpid()
        self._changed = threading.Condition()
        self._server: PrivateServer | None = None
        """The latest one that has been started."""
        self._is_serving = False
        self._is_closing = False
        self._failure: str | None = None
        """Why there will be no other start."""
        self._taking = threading.RLock()
        """Held by the thread that takes the server's messages."""
        self._restarts_s: deque[float] = deque()
        """When they began, by time.monotonic(), within RESTART_WINDOW_S."""
        self._directory: PrivateDirectory | None = None
        self.socket_path = ""
        self.model = ""

    def start(self) -> None:
        """Raises EngineError."""
        with self._changed:
            self._check_usable()
        assert self._directory is None, "an engine starts once"
        self._directory = PrivateDirectory()
        self.socket_path = str(self._directory.path / SOCKET_NAME)
        # A restart is the same start again, whatever this process has changed meanwhile. The last word counts.
        self._words = ["drain_seconds=0", *self._words, f"unix_socket={self.socket_path}"]
        try:
            config = ServerConfig.parse(self._words)
        except FlagError as error:
            raise EngineError(str(error)) from None
        self._stop_s = config.drain_seconds + (_STOP_S if config.trace is None else _STOP_WITH_TRACE_S)
        self._environment = dict(os.environ)
        self._working_directory: str | None = None
        with suppress(FileNotFoundError):  # it was removed
            self._working_directory = str(Path.cwd())
        with self._taking:
            self._start_server()
        try:
            threading.Thread(target=self._watch, name="engine watch", daemon=True).start()
        except RuntimeError as error:
            raise _not_started(error) from None

    def wait_until_up(self, timeout_s: float) -> None:
        """Raises EngineError."""
        deadline = time.monotonic() + timeout_s
        while True:
            if os.getpid() == self._owner_pid:  # else no thread watches here, and the lock may be held for ever
                self._wait_until_serving(max(0.0, deadline - time.monotonic()))
            if self._accepts_connections():
                return
            if time.monotonic() >= deadline:
                raise EngineNotUp(f"the engine does not serve again after {timeout_s:g} s")
            time.sleep(_LOOK_S)

    def check(self) -> None:
        """Raises EngineError."""
        with self._changed:
            self._check_usable()

    def close(self) -> None:
        """End all processes and remove the directory; in a forked child, nothing."""
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            self._is_closing = True
            self._is_serving = False
            self._changed.notify_all()
        try:
            if self._server is not None:
                self._server.end()
                with self._taking:  # once it has taken the last message
                    self._server.stop()
        finally:
            if self._directory is not None:
                self._directory.remove()

    def _wait_until_serving(self, timeout_s: float) -> None:
        """Or until the timeout. Raises EngineError."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_serving or self._is_closing or self._failure is not None, timeout_s)
            self._check_usable()

    def _check_usable(self) -> None:
        """Raises EngineError. Call with the lock."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._is_closing:
            raise EngineError("the engine is closed")

    def _start_server(self) -> None:
        """Returns when it serves. Raises EngineError."""
        assert self._directory is not None
        server = PrivateServer(
            self._words,
            self._show,
            directory=self._directory.path,
            stop_s=self._stop_s,
            working_directory=self._working_directory,
            environment=self._environment,
        )
        with self._changed:
            self._check_usable()
            try:
                server.start()
            except (OSError, RuntimeError) as error:
                raise _not_started(error) from None
            self._server = server
        try:
            server.wait_until_serving()
        except ServerEnded as ended:
            raise (_KilledAtStart if ended.was_killed else EngineError)(str(ended), ended.exit_code) from None
        with self._changed:
            self.model = server.model
            self._is_serving = not self._is_closing
            self._changed.notify_all()

    def _watch(self) -> None:
        """Start the server again whenever it has ended, until the engine is closed or a start fails."""
        with self._taking:
            self._start_again_and_again()

    def _start_again_and_again(self) -> None:
        assert self._server is not None, "it has been started"
        why: Exception = self._server.wait_for_end()
        while True:
            with self._changed:
                self._is_serving = False
                if self._is_closing:
                    return
            self._server.stop()
            number = self._note_restart()
            if number is None:
                limit = f"{MAX_RESTARTS} restarts within {RESTART_WINDOW_S / 60:g} minutes"
                self._give_up(f"the engine died again after {limit}: {why}")
                return
            self._show(f"toka: the engine died: {why}; restart {number}")
            try:
                Path(self.socket_path).unlink(missing_ok=True)
                self._start_server()
            except _KilledAtStart as killed:
                why = killed
                continue
            except (EngineError, OSError) as error:
                self._give_up(f"the engine did not start again: {error}")
                return
            self._show("toka: the engine serves again")
            why = self._server.wait_for_end()

    def _note_restart(self) -> int | None:
        """Its number among the latest; None if it would be one too many."""
        now_s = time.monotonic()
        while self._restarts_s and now_s - self._restarts_s[0] > RESTART_WINDOW_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) == MAX_RESTARTS:
            return None
        self._restarts_s.append(now_s)
        return len(self._restarts_s)

    def _give_up(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()
        self._show(f"toka: {why}")

    def _show(self, line: str) -> None:
        if not self._is_closing:
            with suppress(Exception):  # where it is shown must not decide whether the engine runs
                self._show_line(line)

    def _accepts_connections(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            return client.connect_ex(self.socket_path) in (0, errno.EAGAIN)  # EAGAIN: many clients wait already


def _not_started(error: OSError | RuntimeError) -> EngineError:
    """What the system refuses: processes, threads, open files, or space."""
    reason = describe_shortage(error)
    if reason is None and isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}"
    return EngineError(f"the engine cannot be started: {reason or error}")


class PrivateDirectory:
    """A new directory that only this user can open, with a path short enough for a socket in it.

    This process and the launcher hold a lock in it. If both are killed at once, which nobody can notice, the next start
    of any engine finds that nobody holds the lock, and removes the directory."""

    def __init__(self) -> None:
        """Raises EngineError."""
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + _ROOM_BYTES > MAX_SOCKET_PATH_BYTES:
            parent = "/tmp"
        _remove_abandoned(Path(parent))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = lock_file(self.path)
        except OSError as error:
            raise _not_started(error) from None

    def remove(self) -> None:
        """May be called again."""
        if self._lock >= 0:
            os.close(self._lock)  # first: the removal needs descriptors, and there may be no others
            self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Directories of engines whose processes were all killed at once."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _ABANDONED_S:
                continue
            descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if a process has locked it
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
