"""One SQLite database: its tables, a thread that writes in groups, one that reads, and threads for blocking work."""

import asyncio
import errno
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import apsw

from tokasaurus.server.jobs.store.data_dir import StorageFull, StoreError, open_privately

logger = logging.getLogger(__name__)

Params = ParamSpec("Params")
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
    return connection


def explain(error: BaseException) -> StoreError:
    """The error of SQLite or of the file system, as the user should see it."""
    if isinstance(error, StoreError):
        return error
    if _is_full(error):
        return StorageFull("no space is left on the device of data_dir")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return StoreError(f"the database in data_dir is damaged ({error})")
    if isinstance(error, OSError):
        return StoreError(f"data_dir: {error.strerror}")
    return StoreError(f"the database in data_dir: {error}")


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, apsw.IOError):  # the file that the connections share cannot grow
        return getattr(error, "extendedresult", None) == apsw.SQLITE_IOERR_SHMSIZE
    return isinstance(error, apsw.FullError)


def _open_for_writing(path: Path, may_be_new: bool) -> apsw.Connection:
    """The database at the newest version, created if `may_be_new`. Raises StoreError and apsw.Error: then nothing in
    it was changed."""
    log = path_of_log(path)
    was_killed = _num_bytes(log) > 0
    if _num_bytes(path) == 0 and (was_killed or not may_be_new):  # SQLite would begin anew, and delete the log
        raise StoreError(f"the database {path} is missing or empty, but data_dir has what belongs to it")
    with suppress(OSError):  # SQLite says why
        os.close(open_privately(path, os.O_RDWR | os.O_CREAT))  # SQLite's other files get its mode
    connection = open_connection(path, can_write=True)
    try:
        _check(connection, path, may_be_new)
    except BaseException:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()
        raise
    if not was_killed and check_version(connection) == 0:  # it cannot be set once there are tables
        connection.pragma("auto_vacuum", "incremental")
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")
    connection.pragma("fullfsync", True)  # macOS: its fsync does not reach the disk
    connection.pragma("wal_autocheckpoint", _WAL_PAGES)
    if was_killed:
        _report_log(connection, log)
    migrate(connection)
    return connection


def _check(connection: apsw.Connection, path: Path, may_be_new: bool) -> None:
    """Raises StoreError if the database cannot be used; changes nothing in it."""
    try:
        damage = connection.pragma("quick_check", 1)  # reads all of it, a second per GB
        version = check_version(connection)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        damage = str(error)
    if damage != "ok":
        damage = " ".join(str(damage).split())
        raise StoreError(f"the database {path} is damaged ({damage}); nothing was changed in it")
    if version == 0 and not may_be_new:
        raise StoreError(f"the database {path} has no tables, but data_dir has what belongs to it")


def _report_log(connection: apsw.Connection, log: Path) -> None:
    """Say whether a transaction at the end of the log is lost."""
    with suppress(apsw.Error, OSError):  # only a message
        num_frames, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        if has_unread_frames(log, num_frames):
            logger.warning(
                "the end of %s is no whole transaction and is ignored: it was being written when the last server was "
                "killed, or the file is damaged",
                log,
            )


def _num_bytes(path: Path) -> int:
    """0 if there is no such file. Raises StoreError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot use {path}: {error.strerror}") from None


class Database:
    """Operations of many callers, in order; waiting operations are committed together, so that they share one fsync."""

    def __init__(self, path: Path | None, may_be_new: bool = True) -> None:
        """Opens or creates the database, and brings it to the newest version. path: None for one without any rows,
        until `move_to`.

        may_be_new: whether it may be created. Raises StoreError: then nothing in it was changed."""
        self._writing, self._reading = (_empty(), _empty()) if path is None else _open_both(path, may_be_new)
        self._queue: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_all, name="batch writer", daemon=True)
        self._writer.start()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batch reader")

    def move_to(self, path: Path) -> None:
        """Create the database, or open it if it is there: from now on, operations find it. Precondition: there were no
        rows. Blocks. Raises StoreError."""
        # those that run go on with the connections that they have
        self._writing, self._reading = _open_both(path, may_be_new=True)

    def submit(self, operation: Operation[Result]) -> "Future[Result]":
        """Write: the future is done when the result is on the disk. Raises StoreError in the future."""
        future: Future[Result] = Future()
        with self._submitting:
            if self._is_closed:
                future.set_exception(StoreError("the database is closed"))
            else:
                self._queue.put((operation, future))
        return future

    async def write(self, operation: Operation[Result]) -> Result:
        """Returns when what the operation wrote is on the disk; a caller that is cancelled does not undo it. Raises
        StoreError: then none of it is stored."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(operation)))

    async def read(self, operation: Operation[Result]) -> Result:
        """The operation's result; what `write` has returned is seen. Raises StoreError."""

        def run() -> Result:
            connection = self._reading
            try:
                connection.execute("BEGIN")
                try:
                    return operation(connection)
                finally:
                    if not connection.get_autocommit():  # some errors end the transaction
                        connection.execute("COMMIT")
            except apsw.Error as error:
                raise explain(error) from None

        return await asyncio.get_running_loop().run_in_executor(self._reader, run)

    def close(self) -> None:
        """Waits for what was submitted; nothing can be submitted any more."""
        with self._submitting:
            self._is_closed = True
            self._queue.put(None)
        self._writer.join()
        self._reader.shutdown()
        for connection in (self._reading, self._writing):
            with suppress(apsw.Error):  # a full disk: the next start reads the log
                connection.close()

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
            # of what was cancelled before, nothing is done
            self._commit([one for one in group if one is not None and one[1].set_running_or_notify_cancel()])

    def _commit(self, group: list[tuple[Operation[Any], "Future[Any]"]]) -> None:
        if not group:
            return
        connection = self._writing
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.Error as error:
            for _, future in group:
                future.set_exception(explain(error))
            return
        try:
            outcomes = [_run(connection, operation) for operation, _ in group]
            connection.execute("COMMIT")
        except BaseException as error:
            _roll_back(connection)
            if len(group) > 1:  # one of them must not make the others fail
                for waiting in group:
                    self._commit([waiting])
            else:
                known = isinstance(error, (apsw.Error, OSError))
                group[0][1].set_exception(explain(error) if known else error)
            return
        for (_, future), (result, refusal) in zip(group, outcomes, strict=True):
            if refusal is None:
                future.set_result(result)
            else:
                future.set_exception(refusal)


def _run(connection: apsw.Connection, operation: Operation[Any]) -> tuple[Any, Exception | None]:
    """(what the operation returned, what it raised): if it refuses to write, for example because a file does not
    exist, the others of its transaction are not affected. Raises apsw.Error and OSError."""
    connection.execute("SAVEPOINT operation")
    try:
        outcome: tuple[Any, Exception | None] = operation(connection), None
    except (apsw.Error, OSError):  # SQLite may have ended the transaction
        raise
    except Exception as error:
        connection.execute("ROLLBACK TO operation")
        outcome = None, error
    connection.execute("RELEASE operation")
    return outcome


def _roll_back(connection: apsw.Connection) -> None:
    if not connection.get_autocommit():
        with suppress(apsw.Error):
            connection.execute("ROLLBACK")


def _open_both(path: Path, may_be_new: bool) -> tuple[apsw.Connection, apsw.Connection]:
    """Connections to write and to read. Raises StoreError."""
    try:
        return _open_for_writing(path, may_be_new), open_connection(path, can_write=False)
    except apsw.Error as error:
        raise explain(error) from None


def _empty() -> apsw.Connection:
    """A connection to a database in memory that has the tables and no rows."""
    connection = apsw.Connection(":memory:")
    migrate(connection)
    return connection


async def run_blocking(work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """What `work` returns or raises, but StoreError in place of OSError. A caller that is cancelled waits nevertheless
    for its end: nobody else may use the same file before."""
    running = asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        running.exception()  # or it would be logged
        raise
    except OSError as error:
        raise explain(error) from None


# Keys of `lines`, `results` and `kept` are batches.number << LINE_BITS | number of the line.
LINE_BITS = 32

MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER
    ) STRICT;
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        expires_at INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        status TEXT NOT NULL,
        final_status TEXT,
        model TEXT,
        cache_salt TEXT NOT NULL,
        metadata TEXT,
        errors TEXT,
        output_expires_after INTEGER,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        completed_at INTEGER,
        failed_at INTEGER,
        expired_at INTEGER,
        cancelling_at INTEGER,
        cancelled_at INTEGER,
        output_file_id TEXT,
        error_file_id TEXT,
        num_lines INTEGER NOT NULL DEFAULT 0,
        num_completed INTEGER NOT NULL DEFAULT 0,
        num_failed INTEGER NOT NULL DEFAULT 0,
        input_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER NOT NULL DEFAULT 0,
        output_tokens INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE lines (
        key INTEGER PRIMARY KEY,
        custom_id TEXT NOT NULL,
        start INTEGER NOT NULL,
        size INTEGER NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        seed INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE results (
        key INTEGER PRIMARY KEY REFERENCES lines (key),
        content BLOB NOT NULL
    ) STRICT;
    """,
    "ALTER TABLE batches ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0",
    "CREATE TABLE kept (key INTEGER PRIMARY KEY REFERENCES lines (key), content BLOB NOT NULL) STRICT",
)


def migrate(connection: apsw.Connection) -> None:
    """Bring the tables to the newest version. Raises StoreError if the database is of a newer Tokasaurus."""
    with connection:
        version = check_version(connection)
        if version == len(MIGRATIONS):  # nothing is written: the disk may be full
            return
        for migration in MIGRATIONS[version:]:
            connection.execute(migration)
        connection.pragma("user_version", len(MIGRATIONS))


def check_version(connection: apsw.Connection) -> int:
    """Migrations that the database has run. Raises StoreError if it is of a newer Tokasaurus."""
    version = int(connection.pragma("user_version"))
    if version > len(MIGRATIONS):
        raise StoreError(
            f"its database has the version {version}, and this Tokasaurus knows versions up to {len(MIGRATIONS)}: "
            "use a newer one"
        )
    return version


_HEADER = struct.Struct(">8I")
_FRAME_HEADER_BYTES = 24
_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN = 0x377F0682, 0x377F0683


def path_of_log(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


# SQLite tells how many frames it has accepted, but nothing of those behind them. The size of the log alone does not
# tell whether there are any: the log is overwritten from its beginning, so older frames lie at its end. They would not,
# if SQLite truncated the log each time (journal_size_limit=0), but then groups of 64 rows of 2 kB took a third longer.
def has_unread_frames(log: Path, num_frames: int) -> bool:
    """Whether the log has more than the `num_frames` frames that SQLite has accepted: a transaction that was not
    written to its end, or that is damaged. Older frames, which were copied to the database before, do not count.

    Raises OSError."""
    with log.open("rb") as content:
        header = content.read(_HEADER.size)
        if not _is_sound(header):
            return len(header) > 0
        _, _, page_size, _, salt_1, salt_2, _, _ = _HEADER.unpack(header)
        salt = struct.pack(">2I", salt_1, salt_2)
        frame_bytes = _FRAME_HEADER_BYTES + page_size
        content.seek(_HEADER.size + num_frames * frame_bytes)
        while frame := content.read(frame_bytes):
            if frame[8:16] == salt:
                return True
    return False


def _is_sound(header: bytes) -> bool:
    """Whether the log's header has its checksum."""
    if len(header) < _HEADER.size:
        return False
    magic, *_, sum_1, sum_2 = _HEADER.unpack(header)
    if magic not in (_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN):
        return False
    words = struct.unpack("<6I" if magic == _MAGIC_LITTLE_ENDIAN else ">6I", header[:24])
    first = second = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) % (1 << 32)
        second = (second + odd + first) % (1 << 32)
    return (first, second) == (sum_1, sum_2)
