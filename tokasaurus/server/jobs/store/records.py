"""What the database stores: files, batches and the lines of a batch. Every function runs within a transaction."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from typing import Any, TypeVar

import apsw

from tokasaurus.server.protocol.batches import BatchStatus
from tokasaurus.server.protocol.files import Purpose

FINAL_STATUSES: tuple[BatchStatus, ...] = ("failed", "completed", "cancelled", "expired")
"""A batch with one of these never changes again."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Times are seconds since 1970."""

    id: str
    purpose: Purpose
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. Times are seconds since 1970, None if not reached."""

    number: int
    """Its key in the database; in the order of creation."""
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    created_at: int
    status: BatchStatus
    final_status: BatchStatus | None = None
    """What it will be when its output files are written; None while it may still run lines."""
    model: str | None = None
    """Name of the model that runs its lines: the server's when it was created."""
    cache_salt: str = ""
    """Salt of the API key that created the batch; see `cache_salt_per_key`."""
    metadata: str | None = None
    """JSON object of strings."""
    errors: str | None = None
    """JSON list of what is wrong with the input file."""
    output_expires_after: int | None = None
    """Seconds that its output files are kept; None: as long as other files."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def num_lines_left(self) -> int:
        """Lines without a result."""
        return self.num_lines - self.num_completed - self.num_failed


class LineState(IntEnum):
    """State of a line in the ledger."""

    PENDING = 0
    RUNNING = 1
    COMPLETED = 2
    """Its result goes to the output file."""
    FAILED = 3
    """Its result goes to the error file."""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line of a valid input file. start, size: its place in the file, in bytes, without the line end."""

    number: int
    """The line's number, from 0."""
    custom_id: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line to run."""

    number: int
    custom_id: str
    start: int
    size: int
    attempts: int
    """How often it has been started."""
    seed: int
    """Seed if the line's body has none: unsigned 64 bits, drawn once, so that each attempt gives the same text."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line."""

    number: int
    has_failed: bool
    content: bytes
    """The line of the output or error file, with its line end."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


Record = TypeVar("Record", BatchRecord, FileRecord)

_TABLES: dict[type, str] = {BatchRecord: "batches", FileRecord: "files"}


def columns(record: type[FileRecord] | type[BatchRecord]) -> str:
    return ", ".join(field.name for field in fields(record))


def select(
    connection: apsw.Connection, record: type[Record], condition: str = "TRUE", values: tuple[Any, ...] = ()
) -> Iterator[Record]:
    """The records that meet an SQL condition, which may be followed by ORDER BY and LIMIT."""
    query = f"SELECT {columns(record)} FROM {_TABLES[record]} WHERE {condition}"
    return (record(*row) for row in connection.execute(query, values))


def insert(connection: apsw.Connection, record: FileRecord | BatchRecord) -> None:
    names, values = columns(type(record)), astuple(record)
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {_TABLES[type(record)]} ({names}) VALUES ({marks})", values)


def page(
    connection: apsw.Connection,
    record: type[Record],
    after: str | None,
    limit: int,
    newest_first: bool = True,
    condition: str = "TRUE",
    values: tuple[Any, ...] = (),
) -> tuple[list[Record], bool]:
    """(up to `limit` records that follow the one with the id `after`, whether there are more). Raises KeyError if there
    is no such id."""
    table = _TABLES[record]
    if after is not None:
        row = connection.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
        if row is None:
            raise KeyError(after)
        condition, values = f"{condition} AND number {'<' if newest_first else '>'} ?", (*values, row[0])
    order = "DESC" if newest_first else "ASC"
    found = list(select(connection, record, f"{condition} ORDER BY number {order} LIMIT ?", (*values, limit + 1)))
    return found[:limit], len(found) > limit


def new_batch(
    endpoint: str, input_file_id: str, completion_window: str, window_seconds: int, **fields: Any
) -> BatchRecord:
    """A batch that is created now, for `add_batch`. fields: others of BatchRecord."""
    now = int(time.time())
    return BatchRecord(
        number=0,
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=completion_window,
        expires_at=now + window_seconds,
        created_at=now,
        status="validating",
        **fields,
    )


def add_batch(connection: apsw.Connection, record: BatchRecord) -> BatchRecord:
    """The batch with its number; the one that `record` has is ignored."""
    # numbers are not used again: rows of a removed batch may still be in the ledger
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'batches'").fetchone()
    numbered = replace(record, number=1 if row is None else row[0] + 1)
    insert(connection, numbered)
    return numbered


def get_batch(connection: apsw.Connection, batch_id: str) -> BatchRecord | None:
    return next(select(connection, BatchRecord, "id = ?", (batch_id,)), None)


def read_batch(connection: apsw.Connection, number: int) -> BatchRecord:
    """The batch, which must exist."""
    return next(select(connection, BatchRecord, "number = ?", (number,)))


def list_batches(connection: apsw.Connection, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
    """The newest first; as `page`."""
    return page(connection, BatchRecord, after, limit)


def unfinished_batches(connection: apsw.Connection) -> list[BatchRecord]:
    """The oldest first."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    return list(select(connection, BatchRecord, f"status NOT IN ({marks}) ORDER BY number", FINAL_STATUSES))


def finished_batches(connection: apsw.Connection, limit: int) -> list[BatchRecord]:
    """The newest of the finished ones, by their creation, the newest first."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    where = f"status IN ({marks}) ORDER BY number DESC LIMIT ?"
    return list(select(connection, BatchRecord, where, (*FINAL_STATUSES, limit)))


def start_batch(connection: apsw.Connection, number: int, num_lines: int, now: int) -> BatchRecord:
    """A validated batch starts to run; one that is no longer validating is left as it is."""
    _set(
        connection,
        number,
        "status = 'in_progress', in_progress_at = ?, num_lines = ?",
        (now, num_lines),
        "status = 'validating'",
    )
    return read_batch(connection, number)


def fail_batch(connection: apsw.Connection, number: int, errors: str, now: int) -> BatchRecord:
    """errors: JSON list. Only a batch that is validating or in progress can fail."""
    _set(
        connection,
        number,
        "status = 'failed', failed_at = ?, errors = ?",
        (now, errors),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def cancel_batch(connection: apsw.Connection, number: int, now: int) -> BatchRecord:
    """The batch, which is cancelling now unless it is finished, finalizing or cancelling already."""
    _set(
        connection,
        number,
        "status = 'cancelling', final_status = 'cancelled', cancelling_at = ?",
        (now,),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def begin_finalizing(
    connection: apsw.Connection, number: int, final_status: BatchStatus, now: int, errors: str | None = None
) -> BatchRecord:
    """No line of the batch runs any more: its output files are written next.

    final_status: completed, expired, or failed with `errors`, a JSON list. A batch that is finalizing or cancelling
    already keeps what it will be."""
    _set(
        connection,
        number,
        "status = 'finalizing', final_status = ?, finalizing_at = ?, errors = ?",
        (final_status, now, errors),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def finish_batch(
    connection: apsw.Connection, number: int, output_file_id: str | None, error_file_id: str | None, now: int
) -> BatchRecord:
    """The batch gets its final status. Its ledger is no longer needed."""
    batch = read_batch(connection, number)
    assert batch.final_status is not None, "it was finalizing or cancelling"
    _set(
        connection,
        number,
        f"status = final_status, {batch.final_status}_at = ?, output_file_id = ?, error_file_id = ?",
        (now, output_file_id, error_file_id),
        "status IN ('finalizing', 'cancelling')",
    )
    return read_batch(connection, number)


def finished_before(connection: apsw.Connection, time: int, limit: int) -> list[BatchRecord]:
    """Up to `limit` batches that finished before that time."""
    times = ", ".join(f"{status}_at" for status in FINAL_STATUSES)  # each has one of them
    marks = ", ".join("?" * len(FINAL_STATUSES))
    condition = f"status IN ({marks}) AND coalesce({times}) < ? LIMIT ?"
    return list(select(connection, BatchRecord, condition, (*FINAL_STATUSES, time, limit)))


def remove_batch_row(connection: apsw.Connection, number: int) -> None:
    """Its ledger must be removed before."""
    connection.execute("DELETE FROM batches WHERE number = ?", (number,))


def _set(connection: apsw.Connection, number: int, changes: str, values: tuple[object, ...], condition: str) -> None:
    connection.execute(f"UPDATE batches SET {changes} WHERE number = ? AND {condition}", (*values, number))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def get_file(connection: apsw.Connection, file_id: str) -> FileRecord | None:
    return next(select(connection, FileRecord, "id = ?", (file_id,)), None)


def add_file(connection: apsw.Connection, record: FileRecord) -> None:
    """Its content must be in place. A record with the same id is replaced."""
    connection.execute("DELETE FROM files WHERE id = ?", (record.id,))
    insert(connection, record)


def list_files(
    connection: apsw.Connection, purpose: str | None, after: str | None, limit: int, newest_first: bool
) -> tuple[list[FileRecord], bool]:
    """One page of the files with this purpose, or of all; see `page`."""
    condition, values = ("TRUE", ()) if purpose is None else ("purpose = ?", (purpose,))
    return page(connection, FileRecord, after, limit, newest_first, condition, values)


def batch_that_needs(connection: apsw.Connection, file_id: str) -> str | None:
    """The id of a batch that is not finished and reads the file; None if there is none."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    query = f"SELECT id FROM batches WHERE input_file_id = ? AND status NOT IN ({marks})"
    row = connection.execute(query, (file_id, *FINAL_STATUSES)).fetchone()
    return None if row is None else str(row[0])


def remove_file_row(connection: apsw.Connection, file_id: str) -> None:
    """The caller removes the content afterwards."""
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def expired_files(connection: apsw.Connection, now: int, limit: int) -> list[str]:
    """Ids of up to `limit` files past their time that no unfinished batch reads."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    query = (
        "SELECT id FROM files WHERE expires_at <= ? AND NOT EXISTS "
        f"(SELECT 1 FROM batches WHERE input_file_id = files.id AND status NOT IN ({marks})) LIMIT ?"
    )
    return [file_id for (file_id,) in connection.execute(query, (now, *FINAL_STATUSES, limit))]


def file_ids(connection: apsw.Connection) -> set[str]:
    return {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
