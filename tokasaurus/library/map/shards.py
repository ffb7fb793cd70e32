"""The output: a directory of files that appear whole, each with some thousand rows and their answers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import orjson

from tokasaurus.library.map.answers import AnswerColumn, AnswerNames
from tokasaurus.library.map.rows import Row, RowBatch, Source, import_arrow, to_json, without_surrogates
from tokasaurus.library.requests import unpacked_vector

if TYPE_CHECKING:
    import pyarrow as pa

Answers = str | list[str | None] | None
"""One, or a list of n."""

FORMATS = ("parquet", "jsonl")

MAX_SHARD_ROWS = 10_000
MAX_SHARD_BYTES = 64 << 20
MAX_SHARD_AGE_S = 60.0
"""Longest time from a file's first row until it is written."""

_ROW_BYTES = 64
"""Estimated memory of a row, beside its text."""


class RowMisfit(ValueError):
    """The first rows have no types in common that the output could have. The message names the row, the column, and
    what to do. Later rows that do not fit are errors of their own."""


@dataclass(slots=True)
class MapRow:
    """A row from when it is read until it is in a file."""

    number: int
    """Number of the row in the source."""
    batch: RowBatch
    index: int
    """Index of the row in its batch."""
    key_hash: int
    identity: int
    """8 bytes: equal for equal requests."""
    answer: Answers = None
    finish_reason: Answers = None
    error: str | None = None
    error_code: str | None = None
    """A word for the error. Only of rows that this call has finished."""
    more: list[Any] | None = None
    """Its values in the further columns of the answers; None if all are null."""

    @property
    def answer_bytes(self) -> int:
        answer, num_bytes = self.answer, _ROW_BYTES
        if isinstance(answer, str):
            num_bytes += len(answer)
        elif answer is not None:
            num_bytes += sum(len(text or "") for text in answer)
        return num_bytes if self.more is None else num_bytes + len(orjson.dumps(self.more))


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
        """Seconds until the file is to be closed, negative if that is overdue."""
        return self._first_s + MAX_SHARD_AGE_S - time.monotonic() if self.rows else MAX_SHARD_AGE_S

    def index(self) -> npt.NDArray[np.uint64]:
        """[rows, 2]: key hash and request identity of each, in the order of the file."""
        rows = sorted(self.rows, key=attrgetter("number"))
        index = np.empty((len(rows), 2), np.uint64)
        index[:, 0] = [row.key_hash for row in rows]
        index[:, 1] = [row.identity for row in rows]
        return index


class ShardFormat(Protocol):
    """How rows are written. Its files hold the rows of a shard in the order of the source. Methods raise OSError."""

    suffix: str

    def begin(self, first: Path | None) -> None:
        """Call it before the rows. first: the first file of the output, written by an earlier call; None if there is
        none."""
        ...

    def prepare(self, batch: RowBatch) -> float:
        """Take from the batch what will be written; call it once, before its dicts are dropped. What cannot be stored
        is left out, and the row gets an error.

        Returns the mean memory of a row, in bytes. Raises RowMisfit."""
        ...

    def write(self, path: Path, rows: Sequence[MapRow]) -> None: ...

    def count_rows(self, path: Path) -> int:
        """Number of rows in a file of the output."""
        ...

    def find_errors(self, path: Path) -> npt.NDArray[np.bool_]:
        """[rows] of a file of the output: whether each has an error."""
        ...

    def copy(self, path: Path, target: Path, is_kept: npt.NDArray[np.bool_]) -> None:
        """Write some of its rows to another file."""
        ...


class JsonShards:
    """JSON lines. Rows that came as JSON keep their text."""

    suffix = ".jsonl"

    def __init__(self, names: AnswerNames) -> None:
        self._names = names

    def begin(self, first: Path | None) -> None:
        del first

    def prepare(self, batch: RowBatch) -> float:
        rows = batch.rows()
        names = set(self._names)
        for index, row in enumerate(rows):
            if not names.isdisjoint(row):
                name = min(names & row.keys())
                batch.errors.setdefault(
                    index,
                    f"{batch.place(index)} has a column {name!r}, as a column of the answers is named: prefix= names "
                    "them otherwise",
                )
                rows[index] = {name: value for name, value in row.items() if name not in names}
                if batch.lines is not None:
                    batch.lines[index] = to_json(rows[index])
        if batch.lines is None:
            batch.lines = [self._to_json(row, batch, index) for index, row in enumerate(rows)]
        batch.dicts, batch.table = rows, None
        return sum(len(line or b"") for line in batch.lines) / batch.num_rows

    def write(self, path: Path, rows: Sequence[MapRow]) -> None:
        parts = []
        names = self._names
        empty: Sequence[Any] = [None] * len(names.more)
        for row in sorted(rows, key=lambda row: row.number):
            assert row.batch.lines is not None
            line = row.batch.lines[row.index]
            assert line is not None
            more = empty if row.more is None else row.more
            values: tuple[Any, ...] = (row.answer, row.finish_reason, row.error, *more)
            if names.vector_size is not None:
                values = vector_of(row, names), row.error
            answers = to_json(dict(zip(names, values, strict=True)))
            is_empty = not line[1:-1].strip()
            parts.append(answers if is_empty else b"%b,%b" % (line[:-1], answers[1:]))
        parts.append(b"")
        self._write_lines(path, parts)

    def count_rows(self, path: Path) -> int:
        return len(self._read_lines(path))

    def find_errors(self, path: Path) -> npt.NDArray[np.bool_]:
        name = self._names.error
        return np.array([orjson.loads(line)[name] is not None for line in self._read_lines(path)], np.bool_)

    def copy(self, path: Path, target: Path, is_kept: npt.NDArray[np.bool_]) -> None:
        lines = self._read_lines(path)
        self._write_lines(target, [*(line for line, kept in zip(lines, is_kept, strict=True) if kept), b""])

    @staticmethod
    def _read_lines(path: Path) -> list[bytes]:
        return path.read_bytes().split(b"\n")[:-1]

    @staticmethod
    def _write_lines(path: Path, parts: Sequence[bytes]) -> None:
        with path.open("wb") as file:
            file.write(b"\n".join(parts))
            _sync(file.fileno(), file.flush)

    def _to_json(self, row: Row, batch: RowBatch, index: int) -> bytes:
        try:
            # A copy: what orjson returns has a buffer of 4 KB, however short the text is.
            return bytes(memoryview(to_json(row)))
        except TypeError:
            stored = {}
            for name, value in row.items():
                try:
                    to_json({name: value})
                except TypeError:
                    batch.errors.setdefault(
                        index,
                        f"{batch.place(index)}: its column {name!r} is {type(value).__name__}, which JSON does not "
                        "have: format='parquet' may store it",
                    )
                    value = None
                if isinstance(name, str):
                    stored[name] = value
            return to_json(stored)


class ParquetShards:
    """Parquet files that all have the same schema: the source's, or one that fits the rows until the first file.

    Until then, a column may be new, or null so far. A column that is null in the whole first file, or empty, is one of
    texts; later values that are no texts are stored as JSON text."""

    suffix = ".parquet"

    def __init__(self, source: Source, names: AnswerNames, is_list: bool) -> None:
        """is_list: whether answers are lists. Raises ImportError."""
        self._arrow = import_arrow("a Parquet output")
        self._names = names
        self._is_list = is_list
        self._schema: pa.Schema = self._arrow.schema([]) if source.schema is None else source.schema
        self._is_open = source.schema is None
        """Whether the schema may still change."""

    def begin(self, first: Path | None) -> None:
        if self._is_open and first is not None:
            import pyarrow.parquet as pq

            names = set(self._names)
            self._schema = self._arrow.schema([field for field in pq.read_schema(first) if field.name not in names])
            self._is_open = False

    def prepare(self, batch: RowBatch) -> float:
        if batch.dicts is not None:
            batch.table = self._columns(batch.dicts, batch)
            batch.lines = None
        assert batch.table is not None
        return cast(float, batch.table.nbytes / max(1, batch.num_rows))

    def write(self, path: Path, rows: Sequence[MapRow]) -> None:
        self._close_schema()
        rows = sorted(rows, key=lambda row: row.number)
        parts = []
        for _, group in groupby(rows, key=lambda row: row.batch.first_number):
            members = list(group)
            indices = np.fromiter((row.index for row in members), np.int64, len(members))
            parts.append(self._fitted(members[0].batch.take(indices)))
        table = self._arrow.Table.from_batches(parts, self._schema)
        for column in answer_columns(self._names, rows, self._is_list):
            table = table.append_column(column.name, column.array())
        self._write_table(table, path)

    def count_rows(self, path: Path) -> int:
        import pyarrow.parquet as pq

        return cast(int, pq.read_metadata(path).num_rows)

    def find_errors(self, path: Path) -> npt.NDArray[np.bool_]:
        import pyarrow.parquet as pq

        column = pq.ParquetFile(path).read([self._names.error]).column(0)
        return cast("npt.NDArray[np.bool_]", column.is_valid().to_numpy())

    def copy(self, path: Path, target: Path, is_kept: npt.NDArray[np.bool_]) -> None:
        import pyarrow.parquet as pq

        self._write_table(pq.ParquetFile(path).read().filter(self._arrow.array(is_kept)), target)

    def _write_table(self, table: pa.Table, path: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(table, path, compression="zstd")
        self._arrow.default_memory_pool().release_unused()
        with path.open("rb") as file:
            _sync(file.fileno())

    def _close_schema(self) -> None:
        """All files have the schema from now on."""
        if not self._is_open:
            return
        fields = []
        for field in self._schema:
            kind = _decided(field.type)
            fields.append(field if kind == field.type else field.with_type(kind).with_metadata(_HAS_JSON_TEXT))
        self._schema = self._arrow.schema(fields)
        self._is_open = False

    def _fitted(self, part: pa.RecordBatch) -> pa.RecordBatch:
        """The part with the columns of the schema. Columns that have changed since are null or empty in it."""
        if part.schema.equals(self._schema):
            return part
        columns = []
        for field in self._schema:
            index = part.schema.get_field_index(field.name)
            column = self._arrow.nulls(part.num_rows, field.type) if index < 0 else part.column(index)
            if column.type != field.type:
                values = [_as_text(value, field.type) for value in column.to_pylist()]
                column = self._arrow.array(values, field.type)
            columns.append(column)
        return self._arrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _columns(self, rows: list[Row], batch: RowBatch) -> pa.RecordBatch:
        """Raises RowMisfit."""
        pa = self._arrow
        taken = set(self._names)
        names = dict.fromkeys(self._schema.names)
        for index, row in enumerate(rows):
            if row.keys() <= names.keys():
                continue
            for name in row:
                if name in names:
                    continue
                if not isinstance(name, str):
                    reason = f"{batch.place(index)} has a column {name!r}, and names of columns must be text"
                elif name in taken:
                    reason = (
                        f"{batch.place(index)} has a column {name!r}, as a column of the answers is named: prefix= "
                        "names them otherwise"
                    )
                elif self._is_open:
                    names[name] = None
                    continue
                else:
                    reason = f"{batch.place(index)} has a column {name!r}, which the first rows lack; {_WAY_OUT}"
                batch.errors.setdefault(index, reason)
        columns, fields = [], []
        for name in names:
            position = self._schema.get_field_index(name)
            field = None if position < 0 else self._schema.field(position)
            column = self._column(name, field, [row.get(name) for row in rows], batch)
            columns.append(column)
            fields.append(pa.field(name, column.type) if field is None else field.with_type(column.type))
        self._schema = pa.schema(fields)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, name: str, field: pa.Field | None, values: list[Any], batch: RowBatch) -> pa.Array:
        """A column of the field's type, or of a wider one while the schema is open. Raises RowMisfit."""
        if not self._is_open:
            assert field is not None, "the schema has all columns"
            if field.metadata is not None and _HAS_JSON_TEXT.items() <= field.metadata.items():
                values = [_as_text(value, field.type) for value in values]
            return self._convert(field, values, batch)
        found = self._inferred(values)
        if found is None:
            if field is None or _is_undecided(field.type):
                field = self._arrow.field(name, self._first_type(values))
            return self._convert(field, values, batch)
        if field is None:
            return found
        kind = _widened(field.type, found.type)
        if kind is not None and kind.equals(found.type):
            return found
        return self._convert(field if kind is None else field.with_type(kind), values, batch)

    def _inferred(self, values: list[Any]) -> pa.Array | None:
        """None if the values have no type in common."""
        try:
            return self._arrow.array(values)
        except UnicodeEncodeError:
            return self._inferred(without_surrogates(values))
        except self._misfits:
            return None

    def _first_type(self, values: list[Any]) -> pa.DataType:
        """The type that as many of the first values as possible have in common."""
        low, high = 0, len(values)  # the first `low` values fit, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if self._inferred(values[:middle]) is None:
                high = middle
            else:
                low = middle
        first = self._inferred(values[:low])
        assert first is not None, "the first `low` values fit"
        return first.type

    def _convert(self, field: pa.Field, values: list[Any], batch: RowBatch) -> pa.Array:
        """Values that have another type are null, and errors of their rows. Raises RowMisfit if these are the rows
        that decide on the type, and it fits less than half of them."""
        pa = self._arrow
        wrong: list[int] = []
        try:
            column = pa.array(values, field.type)
        except UnicodeEncodeError:
            return self._convert(field, without_surrogates(values), batch)
        except self._misfits:
            wrong = [index for index, value in enumerate(values) if not self._fits(value, field.type)]
        if _has_struct(field.type):  # pyarrow drops members that the type does not have
            also = (index for index, value in enumerate(values) if not _members_fit(value, field.type))
            wrong = sorted({*wrong, *also})
        if not wrong:
            return column
        for index in wrong:
            batch.errors.setdefault(index, self._misfit(field, values[index], batch.place(index)))
        if self._is_open and batch.first_number == 0 and 2 * len(wrong) > sum(value is not None for value in values):
            raise RowMisfit(batch.errors[wrong[0]])
        values = list(values)
        for index in wrong:
            values[index] = None
        return pa.array(values, field.type)

    def _fits(self, value: Any, kind: pa.DataType) -> bool:
        try:
            self._arrow.array([value], kind)
        except UnicodeEncodeError:
            return self._fits(without_surrogates(value), kind)
        except self._misfits:
            return False
        return True

    @property
    def _misfits(self) -> tuple[type[Exception], ...]:
        return (self._arrow.ArrowException, TypeError, ValueError, OverflowError)

    @staticmethod
    def _misfit(field: pa.Field, value: Any, place: str) -> str:
        return f"{place}: its column {field.name!r} is {_shown(value)}, and was {field.type} so far; {_WAY_OUT}"


_HAS_JSON_TEXT = {b"tokasaurus": b"values that are no texts are JSON text"}
"""Metadata of a field whose column was null in the first file."""
_WAY_OUT = "Parquet has one type for each column: format='jsonl' stores any"


def make_format(name: str, source: Source, names: AnswerNames, is_list: bool) -> ShardFormat:
    """name: one of FORMATS. Raises ImportError."""
    return JsonShards(names) if name == "jsonl" else ParquetShards(source, names, is_list)


def answer_columns(names: AnswerNames, rows: Sequence[MapRow], is_list: bool) -> list[AnswerColumn]:
    """The columns that are added, with a value for each row."""
    if names.vector_size is not None:
        vectors = [vector_of(row, names) for row in rows]
        error = AnswerColumn(names.error, [row.error for row in rows], False)
        return [AnswerColumn(names.answer, vectors, False, "", names.vector_size, names.vector_dtype), error]
    return [
        AnswerColumn(names.answer, [row.answer for row in rows], is_list),
        AnswerColumn(names.finish_reason, [row.finish_reason for row in rows], is_list),
        AnswerColumn(names.error, [row.error for row in rows], False),
        *(
            AnswerColumn(name, [None if row.more is None else row.more[index] for row in rows], is_list, field)
            for index, (name, field) in enumerate(zip(names.more, names.fields, strict=True))
        ),
    ]


def vector_of(row: MapRow, names: AnswerNames) -> npt.NDArray[np.floating[Any]] | None:
    """Of a row whose answer is one, in base64."""
    assert row.answer is None or isinstance(row.answer, str)
    return None if row.answer is None else unpacked_vector(row.answer).astype(names.vector_dtype)


def shard_name(number: int, suffix: str) -> str:
    return f"part-{number:06d}{suffix}"


def _sync(file: int, flush: Any = None) -> None:
    if flush is not None:
        flush()
    os.fsync(file)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _is_undecided(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or (pa.types.is_struct(kind) and kind.num_fields == 0))


def _widened(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, where either is null or empty so far; None if there is none."""
    import pyarrow as pa

    if old.equals(new) or pa.types.is_null(new):
        return old
    if pa.types.is_null(old):
        return new
    if pa.types.is_list(old) and pa.types.is_list(new):
        inner = _widened(old.value_type, new.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        members = {old.field(i).name: old.field(i).type for i in range(old.num_fields)}
        for i in range(new.num_fields):
            member = new.field(i)
            kind = _widened(members.get(member.name, pa.null()), member.type)
            if kind is None:
                return None
            members[member.name] = kind
        return pa.struct(list(members.items()))
    return None


def _decided(kind: pa.DataType) -> pa.DataType:
    """The type with texts for all that is null or empty so far."""
    import pyarrow as pa

    if _is_undecided(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_decided(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(kind.field(i).name, _decided(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def _as_text(value: Any, kind: pa.DataType) -> Any:
    """The value, with JSON text where the type has a text and the value none."""
    import pyarrow as pa

    if value is None or isinstance(value, str):
        return value
    if pa.types.is_string(kind):
        try:
            return to_json(value).decode()
        except TypeError:
            return str(value)
    if pa.types.is_list(kind) and isinstance(value, list | tuple):
        return [_as_text(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        members = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return {name: _as_text(item, members.get(name, pa.null())) for name, item in value.items()}
    return value


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
