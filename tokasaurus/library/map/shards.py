"""The output: a directory of files that appear whole, each with some thousand rows and their answers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tokasaurus.library.map.sources import (
    AnswerColumn,
    Row,
    RowBatch,
    Source,
    import_arrow,
    to_json,
    without_surrogates,
)
from tokasaurus.server.jobs.store.data_dir import sync_directory

if TYPE_CHECKING:
    import pyarrow as pa

Answers = str | list[str | None] | None
"""One, or a list of n."""

FORMATS = ("parquet", "jsonl")

MAX_SHARD_ROWS = 10_000
MAX_SHARD_BYTES = 64 << 20
MAX_SHARD_AGE_S = 60.0
"""Since its first row."""

_ROW_BYTES = 64
"""Estimated memory of a row, beside its text."""


class RowMisfit(ValueError):
    """A row does not have the columns that the job's output has. The message names the row, the column, and what to
    do."""


@dataclass(frozen=True, slots=True)
class AnswerNames:
    """Names of the columns that are added to those of the rows."""

    answer: str
    """Text, or a list of n texts; null if there is an error."""
    finish_reason: str
    """Likewise."""
    error: str
    """Null unless the row could not be answered."""

    def __iter__(self) -> Any:
        return iter((self.answer, self.finish_reason, self.error))


def answer_names(columns: Sequence[str], prefix: str) -> AnswerNames:
    """Raises ValueError if the rows have a column of such a name."""
    names = AnswerNames(f"{prefix}answer", f"{prefix}finish_reason", f"{prefix}error")
    taken = [name for name in names if name in columns]
    if taken:
        raise ValueError(
            f"the rows have a column {taken[0]!r} already, as a column of the answers would be named: "
            f"prefix={prefix + 'model_'!r} names it {prefix + 'model_' + taken[0].removeprefix(prefix)!r}"
        )
    return names


@dataclass(slots=True)
class MapRow:
    """A row from when it is read until it is in a file."""

    number: int
    """In the source."""
    batch: RowBatch
    index: int
    """In its batch."""
    key_hash: int
    identity: int
    """8 bytes: equal for equal requests."""
    answer: Answers = None
    finish_reason: Answers = None
    error: str | None = None

    @property
    def answer_bytes(self) -> int:
        answer = self.answer
        if answer is None:
            return _ROW_BYTES
        return _ROW_BYTES + (len(answer) if isinstance(answer, str) else sum(len(text or "") for text in answer))


class OpenShard:
    """Rows of the next file."""

    def __init__(self) -> None:
        self.rows: list[MapRow] = []
        self._num_bytes = 0.0
        self._first_s = 0.0

    def add(self, row: MapRow, row_bytes: float) -> None:
        """row_bytes: memory of the row without its answer."""
        if not self.rows:
            self._first_s = time.monotonic()
        self.rows.append(row)
        self._num_bytes += row_bytes + row.answer_bytes

    def room(self) -> int:
        """Rows until it is full, if they are short."""
        return MAX_SHARD_ROWS - len(self.rows)

    def is_full(self) -> bool:
        return len(self.rows) >= MAX_SHARD_ROWS or self._num_bytes >= MAX_SHARD_BYTES

    def seconds_left(self) -> float:
        """Until it is to be closed, negative if that is overdue."""
        return self._first_s + MAX_SHARD_AGE_S - time.monotonic() if self.rows else MAX_SHARD_AGE_S

    def index(self) -> npt.NDArray[np.uint64]:
        """[rows, 2]: key hash and request identity of each."""
        index = np.empty((len(self.rows), 2), np.uint64)
        index[:, 0] = [row.key_hash for row in self.rows]
        index[:, 1] = [row.identity for row in self.rows]
        return index


class ShardFormat(Protocol):
    """How rows are written. Its files hold the rows of a shard in the order of the source."""

    suffix: str

    def prepare(self, batch: RowBatch) -> float:
        """Take from the batch what will be written; call it once, before its dicts are dropped.

        Returns the mean memory of a row, in bytes. Raises RowMisfit."""
        ...

    def write(self, path: Path, rows: Sequence[MapRow]) -> None:
        """Raises OSError."""
        ...


class JsonShards:
    """JSON lines. Rows that came as JSON keep their text."""

    suffix = ".jsonl"

    def __init__(self, names: AnswerNames) -> None:
        self._names = names

    def prepare(self, batch: RowBatch) -> float:
        rows = batch.rows()
        for name in self._names:
            for index, row in enumerate(rows):
                if name in row:
                    raise RowMisfit(
                        f"{batch.place(index)} has a column {name!r}, as a column of the answers is named: "
                        "prefix= names them otherwise"
                    )
        if batch.lines is None:
            batch.lines = [self._to_json(row, batch, index) for index, row in enumerate(rows)]
        batch.dicts, batch.table = rows, None
        return sum(len(line or b"") for line in batch.lines) / batch.num_rows

    def write(self, path: Path, rows: Sequence[MapRow]) -> None:
        parts = []
        for row in sorted(rows, key=lambda row: row.number):
            assert row.batch.lines is not None
            line = row.batch.lines[row.index]
            assert line is not None
            answers = to_json(dict(zip(self._names, (row.answer, row.finish_reason, row.error), strict=True)))
            is_empty = not line[1:-1].strip()
            parts.append(answers if is_empty else b"%b,%b" % (line[:-1], answers[1:]))
        parts.append(b"")
        with path.open("wb") as file:
            file.write(b"\n".join(parts))
            _sync(file.fileno(), file.flush)
        for row in rows:
            assert row.batch.lines is not None
            row.batch.lines[row.index] = None

    def _to_json(self, row: Row, batch: RowBatch, index: int) -> bytes:
        try:
            # A copy: what orjson returns has a buffer of 4 KB, however short the text is.
            return bytes(memoryview(to_json(row)))
        except TypeError as error:
            for name, value in row.items():
                try:
                    to_json({name: value})
                except TypeError:
                    raise RowMisfit(
                        f"{batch.place(index)}: its column {name!r} is {type(value).__name__}, which JSON does not "
                        "have: format='parquet' may store it"
                    ) from None
            raise RowMisfit(f"{batch.place(index)} cannot be JSON: {error}") from None


class ParquetShards:
    """Parquet files with the schema of the source, or that of the first rows."""

    suffix = ".parquet"

    def __init__(self, source: Source, names: AnswerNames, is_list: bool) -> None:
        """is_list: whether answers are lists. Raises ImportError."""
        self._arrow = import_arrow()
        self._names = names
        self._is_list = is_list
        self._schema: pa.Schema | None = source.schema

    def prepare(self, batch: RowBatch) -> float:
        if batch.dicts is not None:
            batch.table = self._columns(batch.dicts, batch)
            batch.lines = None
        assert batch.table is not None
        return cast(float, batch.table.nbytes / max(1, batch.num_rows))

    def write(self, path: Path, rows: Sequence[MapRow]) -> None:
        import pyarrow.parquet as pq

        rows = sorted(rows, key=lambda row: row.number)
        parts = []
        for _, group in groupby(rows, key=lambda row: row.batch.first_number):
            members = list(group)
            indices = np.fromiter((row.index for row in members), np.int64, len(members))
            parts.append(members[0].batch.take(indices))
        schema = self._arrow.schema([]) if self._schema is None else self._schema
        table = self._arrow.Table.from_batches(parts, schema)
        for column in answer_columns(self._names, rows, self._is_list):
            table = table.append_column(column.name, column.array())
        pq.write_table(table, path, compression="zstd")
        self._arrow.default_memory_pool().release_unused()
        with path.open("rb") as file:
            _sync(file.fileno())

    def _columns(self, rows: list[Row], batch: RowBatch) -> pa.RecordBatch:
        """Raises RowMisfit."""
        pa = self._arrow
        if self._schema is None:
            names = list(dict.fromkeys(name for row in rows for name in row))
            for name in names:
                if not isinstance(name, str):
                    raise RowMisfit(f"{batch.origin} have a column {name!r}, and names of columns must be text")
            columns = [self._infer(name, [row.get(name) for row in rows], batch) for name in names]
            self._schema = pa.schema([pa.field(name, column.type) for name, column in zip(names, columns, strict=True)])
            return pa.RecordBatch.from_arrays(columns, schema=self._schema)
        known = set(self._schema.names)
        for index, row in enumerate(rows):
            if not row.keys() <= known:
                name = min(map(str, row.keys() - known))
                raise RowMisfit(f"{batch.place(index)} has a column {name!r}, which the first rows lack; {_WAY_OUT}")
        columns = [self._convert(field, [row.get(field.name) for row in rows], batch) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _infer(self, name: str, values: list[Any], batch: RowBatch) -> pa.Array:
        """Raises RowMisfit for the first value that does not go with those before it."""
        pa = self._arrow
        try:
            return pa.array(values)
        except UnicodeEncodeError:
            return self._infer(name, without_surrogates(values), batch)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            low, high = 0, len(values)  # the first `low` values fit, the first `high` do not
            while high - low > 1:
                middle = (low + high) // 2
                try:
                    pa.array(values[:middle])
                    low = middle
                except (pa.ArrowException, TypeError, ValueError, OverflowError):
                    high = middle
            raise RowMisfit(
                f"{batch.place(low)}: its column {name!r} is {_shown(values[low])}, which does not go with the rows "
                f"before it; {_WAY_OUT}"
            ) from None

    def _convert(self, field: pa.Field, values: list[Any], batch: RowBatch) -> pa.Array:
        """Raises RowMisfit for the first value that has another type."""
        pa = self._arrow
        try:
            column = pa.array(values, field.type)
        except UnicodeEncodeError:
            return self._convert(field, without_surrogates(values), batch)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            wrong = next((i for i, value in enumerate(values) if not self._fits(value, field.type)), 0)
            raise self._misfit(field, values[wrong], batch.place(wrong)) from None
        if _has_struct(field.type):  # pyarrow drops members that the type does not have
            for index, value in enumerate(values):
                if not _members_fit(value, field.type):
                    raise self._misfit(field, value, batch.place(index))
        return column

    def _fits(self, value: Any, kind: pa.DataType) -> bool:
        pa = self._arrow
        try:
            pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return False
        return True

    def _misfit(self, field: pa.Field, value: Any, place: str) -> RowMisfit:
        kind = "null in all of the first rows" if self._arrow.types.is_null(field.type) else f"{field.type} so far"
        return RowMisfit(f"{place}: its column {field.name!r} is {_shown(value)}, and was {kind}; {_WAY_OUT}")


_WAY_OUT = "Parquet has one type for each column: format='jsonl' stores any"


def make_format(name: str, source: Source, names: AnswerNames, is_list: bool) -> ShardFormat:
    """name: one of FORMATS. Raises ImportError."""
    return JsonShards(names) if name == "jsonl" else ParquetShards(source, names, is_list)


def answer_columns(names: AnswerNames, rows: Sequence[MapRow], is_list: bool) -> list[AnswerColumn]:
    """The columns that are added, with a value for each row."""
    return [
        AnswerColumn(names.answer, [row.answer for row in rows], is_list),
        AnswerColumn(names.finish_reason, [row.finish_reason for row in rows], is_list),
        AnswerColumn(names.error, [row.error for row in rows], False),
    ]


def shard_name(number: int, suffix: str) -> str:
    return f"part-{number:06d}{suffix}"


def publish(temporary: Path, path: Path) -> None:
    """Give a file that is on the disk its name. Raises OSError."""
    temporary.replace(path)
    sync_directory(path.parent)


def _sync(file: int, flush: Any = None) -> None:
    if flush is not None:
        flush()
    os.fsync(file)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _has_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind) or any(_has_struct(kind.field(i).type) for i in range(kind.num_fields)))


def _members_fit(value: Any, kind: pa.DataType) -> bool:
    """Whether the dicts in a value have only members that the type has."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and isinstance(value, dict):
        members = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return value.keys() <= members.keys() and all(_members_fit(value[name], members[name]) for name in value)
    if isinstance(value, list | tuple) and kind.num_fields == 1:
        return all(_members_fit(item, kind.field(0).type) for item in value)
    return True
