"""Files of rows: which of them a path means, and a reader for each kind.

pyarrow is imported late: JSON lines need it only when their output is Parquet, and CSV files are read without it where
it is not installed; their values are texts then.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import orjson

from tokasaurus.files import numbered_lines
from tokasaurus.library.map.rows import MAX_BATCH_BYTES, MAX_BATCH_ROWS, BadRow, Row, to_json, without_surrogates
from tokasaurus.text.exact_json import loads

if TYPE_CHECKING:
    import pyarrow as pa

_KINDS = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".csv": "CSV",
    ".arrow": "Arrow",
    ".arrows": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
}

_COMPRESSED = {"JSON lines", "CSV"}
"""Kinds that are read with .gz after their suffix as well."""


def matching_files(name: str, output: Path | None) -> list[str]:
    """Files of a path, a directory or a pattern, sorted. Raises FileNotFoundError."""
    path = Path(name).expanduser().absolute()  # files are opened later, perhaps after a chdir
    if path.is_dir():
        found = sorted(str(file) for file in path.iterdir() if file.is_file() and _suffix(file.name) in _KINDS)
        if not found:
            raise FileNotFoundError(f"{name}: the directory has no file that can be read ({_known_suffixes()})")
        return found
    if path.exists():
        return [str(path)]
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
    found = sorted(file for file in matches if not Path(file).is_dir() and not _is_of_output(file, output))
    if not found:
        parent = path.parent
        beside = f"; there is no directory {parent}" if not glob.has_magic(str(parent)) and not parent.is_dir() else ""
        raise FileNotFoundError(f"{name}: no such file{beside}")
    return found


def _is_of_output(file: str, output: Path | None) -> bool:
    """Whether an earlier call with this output has written the file."""
    if output is None:
        return False
    directory = output.expanduser().resolve()
    return not {directory, directory.with_name(f"{directory.name}.toka")}.isdisjoint(Path(file).resolve().parents)


def _suffix(name: str) -> str:
    """Its last suffix, .gz apart."""
    stem = name.removesuffix(".gz")
    suffix = Path(stem).suffix.lower()
    return suffix if stem == name or _KINDS.get(suffix) in _COMPRESSED else ".gz"


def kind_of(path: str) -> str:
    kind = _KINDS.get(_suffix(Path(path).name))
    if kind is None:
        raise ValueError(f"{path}: not a known kind of file; its name must end with one of {_known_suffixes()}")
    return kind


def _known_suffixes() -> str:
    return ", ".join(_KINDS)


def unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, ImportError | MemoryError):
        return error
    return ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}")


class ColumnFile(Protocol):
    path: str
    schema: pa.Schema
    num_rows: int | None

    def __init__(self, path: str, first_schema: pa.Schema | None) -> None:
        """first_schema: of the first file of the call."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]: ...


class ParquetFile:
    def __init__(self, path: str, _first_schema: pa.Schema | None) -> None:
        import pyarrow.parquet as pq

        self.path = path
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            self.schema = file.schema_arrow
            self.num_rows: int | None = metadata.num_rows
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            num_bytes = sum(group.total_byte_size for group in groups)
        row_bytes = num_bytes // max(1, metadata.num_rows) + 1
        self._batch_rows = max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // row_bytes))

    def batches(self) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield from file.iter_batches(self._batch_rows, use_threads=False)


class CsvFile:
    """Types come from the first megabyte of the first file; a column that is empty there is text. Texts that are not
    UTF-8, later values of other types, and rows with more or fewer values than there are columns are errors of their
    rows: pyarrow would make the whole column bytes, or stop reading. An empty field is null, and a text that is empty
    has quotation marks, as Arrow and Polars write them."""

    def __init__(self, path: str, first_schema: pa.Schema | None) -> None:
        import pyarrow as pa

        self.path = path
        self.num_rows: int | None = None
        self.errors: dict[int, str] = {}
        """What is wrong with a row, by its number. The faults of a batch are there when the batch is given."""
        schema = self._open(None).schema
        is_text = [pa.types.is_null(field.type) or pa.types.is_binary(field.type) for field in schema]
        fields = [field.with_type(pa.string()) if text else field for field, text in zip(schema, is_text, strict=True)]
        if first_schema is not None:
            types = {field.name: field.type for field in first_schema}
            fields = [field.with_type(types.get(field.name, field.type)) for field in fields]
        self.schema = pa.schema(fields)

    def batches(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        self.errors.clear()
        as_bytes = [field.with_type(pa.binary()) for field in self.schema]
        typed = [
            raw if pa.types.is_string(field.type) else field for raw, field in zip(as_bytes, self.schema, strict=True)
        ]
        num_done = 0
        try:
            for number, part in self._parts(pa.schema(typed)):
                converted = self._converted(part, number)
                yield converted
                num_done = number + converted.num_rows
        except pa.ArrowInvalid as error:
            if not str(error).startswith("In CSV column"):  # not of a value
                raise
            for number, part in self._parts(pa.schema(as_bytes)):
                if not isinstance(part, str):
                    num_seen = min(max(0, num_done - number), part.num_rows)
                    number, part = number + num_seen, part.slice(num_seen)
                if number >= num_done and len(part):
                    yield self._converted(part, number)

    def _parts(self, schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch | str]]:
        """(number of the first one, rows), or (number, why this row has no values)."""
        wrong: deque[tuple[int, str]] = deque()
        number = 0
        for batch in self._open(schema, wrong):
            while wrong and wrong[0][0] - number <= batch.num_rows:
                wrong_number, why = wrong.popleft()
                if wrong_number > number:
                    yield number, batch.slice(0, wrong_number - number)
                    batch = batch.slice(wrong_number - number)
                yield wrong_number, why
                number = wrong_number + 1
            if batch.num_rows:
                yield number, batch
                number += batch.num_rows
        yield from wrong

    def _converted(self, part: Any, first_number: int) -> pa.RecordBatch:
        """part: rows with bytes in some columns, or why one row has no values. first_number: of its first row."""
        import pyarrow as pa

        if isinstance(part, str):
            self.errors[first_number] = part
            return pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in self.schema], schema=self.schema)
        columns = part.columns
        for index, field in enumerate(self.schema):
            if pa.types.is_binary(columns[index].type):
                convert = self._decoded if pa.types.is_string(field.type) else self._parsed
                columns[index] = convert(columns[index], first_number, field)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _decoded(self, column: Any, first_number: int, field: pa.Field) -> Any:
        import pyarrow as pa

        with suppress(pa.ArrowInvalid):
            return column.cast(pa.string())
        texts = []
        for number, value in enumerate(column.to_pylist(), first_number):
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError as error:
                self.errors[number] = f"its column {field.name!r} is not UTF-8: {error}"
                texts.append(value.decode(errors="replace"))
        return pa.array(texts, pa.string())

    def _parsed(self, column: Any, first_number: int, field: pa.Field) -> Any:
        """The column's texts as values of the field's type, parsed by the CSV reader; null where a text is no such
        value."""
        import pyarrow as pa
        import pyarrow.csv

        content = b"".join(b'"%b"\n' % (value or b"").replace(b'"', b'""') for value in column.to_pylist())
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(content),
                pyarrow.csv.ReadOptions(column_names=["value"]),
                pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                pyarrow.csv.ConvertOptions(column_types={"value": field.type}),
            )
            return table["value"].combine_chunks()
        except pa.ArrowInvalid:
            if len(column) > 1:
                half = len(column) // 2
                first = self._parsed(column[:half], first_number, field)
                return pa.concat_arrays([first, self._parsed(column[half:], first_number + half, field)])
            (value,) = column.to_pylist()
            start = value.decode(errors="replace")[:40]
            self.errors[first_number] = f"its column {field.name!r} is not of the type {field.type}: {start!r}"
            return pa.nulls(1, field.type)

    def _open(self, schema: pa.Schema | None, wrong: deque[tuple[int, str]] | None = None) -> Any:
        """A reader. wrong: gets (number, why it is none) of each row that the reader leaves out."""
        import pyarrow.csv

        def leave_out(row: Any) -> str:
            if wrong is not None:  # the header is row 1
                has = "1 value" if row.actual_columns == 1 else f"{row.actual_columns} values"
                wrong.append((row.number - 2, f"it has {has}, and the file has {row.expected_columns} columns"))
            return "skip"

        convert = pyarrow.csv.ConvertOptions()
        if schema is not None:  # "NA" is null where the type is a number's, which `_parsed` sees to
            convert = pyarrow.csv.ConvertOptions(
                column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
            )
        return pyarrow.csv.open_csv(
            self.path,
            pyarrow.csv.ReadOptions(use_threads=False),  # else rows that are left out have no numbers
            pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=leave_out),
            convert,
        )


class ArrowFile:
    """The file format or the stream format of Arrow IPC, which have the same suffixes."""

    def __init__(self, path: str, _first_schema: pa.Schema | None) -> None:
        self.path = path
        reader, is_file = self._open()
        self.schema = reader.schema
        self.num_rows: int | None = (
            sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches)) if is_file else None
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        reader, is_file = self._open()
        if is_file:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            yield from reader

    def _open(self) -> tuple[Any, bool]:
        """A reader, and whether it can tell its number of batches."""
        import pyarrow as pa

        file = pa.memory_map(self.path)
        try:
            return pa.ipc.open_file(file), True
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_stream(file), False


def check_schema(file: ColumnFile, first: ColumnFile) -> None:
    """Raises ValueError if two files have different columns."""
    if file.schema.equals(first.schema):
        return
    own, others = ({field.name: field.type for field in schema} for schema in (file.schema, first.schema))
    for name in [*others, *own]:
        if own.get(name) != others.get(name):
            has, had = (f"{name} ({types[name]})" if name in types else f"no {name}" for types in (own, others))
            raise ValueError(
                f"files of one call must have equal columns: {first.path} has {had}, {file.path} has {has}"
            )
    if list(own) != list(others):
        raise ValueError(f"{file.path}: its columns have another order than those of {first.path}")
    raise ValueError(f"{file.path}: its columns differ from those of {first.path} in what may be null")


def csv_header(path: str) -> list[str]:
    return next(csv_rows(path), [])


def csv_rows(path: str, num_skipped: int = 0) -> Iterator[list[str]]:
    """Rows that are not empty, bytes that are not UTF-8 as half surrogate pairs. Raises ValueError."""
    csv.field_size_limit(MAX_BATCH_BYTES)
    try:
        with io.TextIOWrapper(_open_binary(path), "utf-8-sig", "surrogateescape", newline="") as file:
            rows = (values for values in csv.reader(file) if values)
            yield from islice(rows, num_skipped, None)
    except (OSError, EOFError, csv.Error) as error:
        raise unreadable(path, error) from None


def csv_row(names: list[str], values: list[str]) -> Row | BadRow:
    if len(values) != len(names):
        has = "1 value" if len(values) == 1 else f"{len(values)} values"
        return BadRow(f"it has {has}, and the file has {len(names)} columns", dict.fromkeys(names))
    row: Row = {name: value or None for name, value in zip(names, values, strict=True)}
    for name, value in row.items():
        if value is not None and not value.isascii():
            raw = value.encode(errors="surrogateescape")
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                shown = {**row, name: raw.decode(errors="replace")}
                return BadRow(f"its column {name!r} is not UTF-8: {error}", without_surrogates(shown))
    return row


def _open_binary(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else Path(path).open("rb")


def count_lines(path: str) -> int:
    count, last = 0, b"\n"
    with _open_binary(path) as file:
        while part := file.read(1 << 20):
            count += part.count(b"\n")
            last = part[-1:]
    return count + (last != b"\n")


def read_json_lines(path: str) -> Iterator[tuple[bytes, Row] | str]:
    """Yields (text, row) for each line that is not empty, or why it is no row. Raises ValueError if the file cannot be
    read."""
    number = 0
    try:
        with _open_binary(path) as file:
            for number, line in numbered_lines(file):
                yield _parse_line(line.strip(), path, number)
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read after line {number}: {error}") from None


def _parse_line(text: bytes, path: str, number: int) -> tuple[bytes, Row] | str:
    try:
        row = loads(text)
    except orjson.JSONDecodeError as error:
        row = _parse_with_surrogates(text)
        if row is None:
            return f"{path}: line {number} is not JSON: {error}{_hint_at_array(text)}"
        text = to_json(row)
    if not isinstance(row, dict):
        return f"{path}: line {number} is not a JSON object, as each line must be{_hint_at_array(text)}"
    return text, row


def _hint_at_array(text: bytes) -> str:
    return "; a JSON array of rows is not JSON lines" if text.startswith(b"[") else ""


def _parse_with_surrogates(text: bytes) -> object:
    """JSON that orjson refuses because a string has half of a surrogate pair; None for anything else."""
    import json

    try:
        return json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
