"""One SQLite database: a thread that writes in groups, and one that reads."""

import asyncio
import errno
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw

from tokasaurus.server.batches.store.errors import StorageFull, StoreError
from tokasaurus.server.batches.store.schema import migrate

Result = TypeVar("Result")
Operation = Callable[[apsw.Connection], Result]
"""Reads or writes, and may be called again if its transaction was rolled back."""

# Operations of one transaction.
_MAX_GROUP = 512
_WAL_PAGES = 4096


def open_connection(path: Path, can_write: bool) -> apsw.Connection:
    """A connection to the database. Raises apsw.Error."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE if can_write else apsw.SQLITE_OPEN_READONLY
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(5000)
    if can_write:
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "full")
        connection.pragma("fullfsync", True)  # macOS: its fsync does not reach the disk
        connection.pragma("wal_autocheckpoint", _WAL_PAGES)
    return connection


def explain(error: BaseException) -> StoreError:
    """The error of SQLite or of the file system, as the user should see it."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, apsw.FullError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    ):
        return StorageFull("no space is left on the device of data_dir")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return StoreError(f"the database in data_dir is damaged ({error}); nothing was changed in it")
    if isinstance(error, OSError):
        return StoreError(f"data_dir: {error.strerror}")
    return StoreError(f"the database in data_dir: {error}")


class Database:
    """Operations of many callers, in order; those that wait are committed together, so that they share one fsync."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the database, and brings it to the newest version. Raises StoreError."""
        try:
            was_closed = not path.with_name(path.name + "-wal").exists()
            self._writing = open_connection(path, can_write=True)
            if not was_closed:  # reads all of the database
                damage = self._writing.pragma("quick_check", 1)
                if damage != "ok":
                    raise StoreError(f"the database {path} is damaged ({damage}); nothing was changed in it")
            migrate(self._writing)
            self._reading = open_connection(path, can_write=False)
        except apsw.Error as error:
            raise explain(error) from None
        self._queue: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="batch writer", daemon=True)
        self._writer.start()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batch reader")

    def submit(self, operation: Operation[Result]) -> "Future[Result]":
        """Write: the future is done when the result is on the disk. Raises StoreError in the future."""
        future: Future[Result] = Future()
        self._queue.put((operation, future))
        return future

    async def write(self, operation: Operation[Result]) -> Result:
        """Returns when what the operation wrote is on the disk; a caller that is cancelled does not undo it. Raises
        StoreError: then none of it is stored."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(operation)))

    async def read(self, operation: Operation[Result]) -> Result:
        """The operation's result; what `write` has returned is seen. Raises StoreError."""

        def run() -> Result:
            try:
                self._reading.execute("BEGIN")
                try:
                    return operation(self._reading)
                finally:
                    self._reading.execute("COMMIT")
            except apsw.Error as error:
                raise explain(error) from None

        return await asyncio.get_running_loop().run_in_executor(self._reader, run)

    def close(self) -> None:
        """Waits for what was submitted."""
        self._queue.put(None)
        self._writer.join()
        self._reader.shutdown()
        with suppress(apsw.Error):  # a full disk: the next start reads the log
            self._reading.close()
            self._writing.close()

    def _write_all(self) -> None:
        is_closing = False
        while not is_closing:
            group = [self._queue.get()]
            while len(group) < _MAX_GROUP:
                try:
                    group.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_closing = None in group
            self._commit([waiting for waiting in group if waiting is not None])

    def _commit(self, group: list[tuple[Operation[Any], "Future[Any]"]]) -> None:
        if not group:
            return
        try:
            self._begin()
            results = [operation(self._writing) for operation, _ in group]
            self._writing.execute("COMMIT")
        except BaseException as error:
            self._roll_back()
            if len(group) > 1:  # one of them must not make the others fail
                for waiting in group:
                    self._commit([waiting])
            else:
                known = isinstance(error, (apsw.Error, OSError))
                group[0][1].set_exception(explain(error) if known else error)
            return
        for (_, future), result in zip(group, results, strict=True):
            future.set_result(result)

    def _begin(self) -> None:
        self._writing.execute("BEGIN IMMEDIATE")

    def _roll_back(self) -> None:
        if not self._writing.get_autocommit():
            with suppress(apsw.Error):
                self._writing.execute("ROLLBACK")
