"""SQL that records are read and written with."""

from collections.abc import Iterator
from dataclasses import astuple, fields
from typing import Any, TypeVar

import apsw

from tokasaurus.server.batches.store.records import BatchRecord, FileRecord

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
