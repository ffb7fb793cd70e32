"""What the database stores (files, batches, and the lines of a batch), and the SQL that reads and writes records."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Any, TypeVar

import apsw

from tokasaurus.server.protocol.storage.batches import BatchStatus
from tokasaurus.server.protocol.storage.files import Purpose

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
    """Used if the line's body has none: unsigned 64 bits, drawn once, so that each attempt gives the same text."""


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
