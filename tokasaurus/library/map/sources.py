"""Rows from whatever the user has: files, data frames, Arrow tables, data sets, iterables of dicts.

pyarrow is imported late: JSON lines and dicts need it only when their output is Parquet, and CSV files are read without
it where it is not installed; their values are texts then.
"""

from __future__ import annotations

import codecs
import csv
import decimal
import glob
import gzip
import hashlib
import io
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt
import orjson

from tokasaurus.library.map.answers import AnswerColumn
from tokasaurus.text.exact_json import dumps, loads

if TYPE_CHECKING:
    import pyarrow as pa

    Rows = str | Path | Sequence[str] | Sequence[Path] | Iterable[Mapping[str, Any]] | pa.Table | Any
    """Paths, data frames, Arrow tables, data sets or dicts."""

Row = dict[str, Any]

MAX_BATCH_ROWS = 1024
MAX_BATCH_BYTES = 8 << 20
"""Most bytes of a batch, estimated from the size of the rows before it."""
_FIRST_BATCH_ROWS = 512
_MAX_READ_S = 1.0
"""An iterable that takes longer for a batch gives a smaller one."""

_MAX_COUNTED_BYTES = 2 << 30
"""Most bytes of JSON-lines files whose lines are counted before they are read."""

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

_MIX_STEP = np.uint64(0x9E3779B97F4A7C15)


class RowBatch:
    """Rows that were read together, either as an Arrow batch or as dicts."""

    def __init__(self, first_number: int, origin: str, first_in_origin: int, num_rows: int) -> None:
        self.first_number = first_number
        """Number of its first row in the source, from 0."""
        self.origin = origin
        """The file, or what else the rows are from."""
        self.first_in_origin = first_in_origin
        """Number of its first row in the origin, from 0."""
        self.num_rows = num_rows
        self.table: pa.RecordBatch | None = None
        """All columns; None if the rows are dicts that need not become columns. After `keep_only`, only some rows."""
        self.dicts: list[Row] | None = None
        """The rows, with None for missing values; None if they came as columns, or are not needed any more."""
        self.given: list[Row] | None = None
        """The rows as they came; None as in `dicts`."""
        self.lines: list[bytes | None] | None = None
        """The rows as JSON text, if they are stored so."""
        self.errors: dict[int, str] = {}
        """Why a row cannot be answered or stored as it came, by its index. Its dict has what can be stored."""
        self._positions: npt.NDArray[np.int64] | None = None

    def place(self, index: int) -> str:
        """Where a row lies, for messages."""
        return f"row {self.first_in_origin + index} of {self.origin}"

    def rows(self, columns: Sequence[str] | None = None) -> list[Row]:
        """The rows as dicts, with None for missing values. columns: names of the needed columns; None means all."""
        if self.dicts is not None:
            return self.dicts
        assert self.table is not None
        table = self.table if columns is None else self.table.select(list(columns))
        columns_without_nan = [_without_nan(column) for column in table.columns]
        return cast("list[Row]", table.from_arrays(columns_without_nan, table.schema.names).to_pylist())

    def column(self, name: str) -> list[Any]:
        """None for missing values, and where a dict lacks it."""
        if self.dicts is not None:
            return [row.get(name) for row in self.dicts]
        assert self.table is not None
        return cast("list[Any]", _without_nan(self.table.column(name)).to_pylist())

    def take(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Some rows of the table."""
        assert self.table is not None
        if self._positions is not None:
            indices = self._positions[indices]
            assert (indices >= 0).all(), "the rows have been kept"
        return self.table.take(_arrow_indices(indices))

    def keep_only(self, indices: npt.NDArray[np.int64]) -> None:
        """Free the memory of the other rows; of a table, if they are the greater part."""
        if self.lines is not None:
            kept = set(indices.tolist())
            self.lines = [line if index in kept else None for index, line in enumerate(self.lines)]
        if self.table is not None and 2 * len(indices) < self.table.num_rows:
            self.table = self.take(indices)
            self._positions = np.full(self.num_rows, -1, np.int64)
            self._positions[indices] = np.arange(len(indices))


class Source(Protocol):
    """An opened source."""

    description: str
    """The source in words, such as "3 Parquet files" or "a Polars DataFrame"."""
    columns: list[str]
    """Names of the columns; for rows that are dicts, the columns of the first batch."""
    schema: pa.Schema | None
    """None if the rows are dicts."""
    num_rows: int | None
    """None if that is not cheap to know."""
    is_json_lines: bool
    paths: Sequence[str]
    """Its files, if it has any."""

    def batches(self) -> Iterator[RowBatch]:
        """All rows, once. Raises ValueError for rows that cannot be read."""
        ...

    def row_origin(self, origin: str) -> str:
        """The part of a row's default key that tells its origin: does not depend on the directory of the files."""
        ...

    keep_rows: bool
    """Set it before `batches` if `joined` will be called: rows that can be read only once are kept."""

    def joined(self, answers: Sequence[AnswerColumn]) -> object:
        """The rows with these columns after theirs, in the type that came in: files become a pyarrow.Table, JSON lines
        a list of dicts. Call it when all batches are read."""
        ...


def open_source(rows: object, key: str | None = None, output: Path | None = None) -> Source:
    """The source of the rows that the user gave.

    rows: a path, a pattern, a directory, or a list of them (Parquet, JSON lines, CSV, Arrow IPC; all of one kind); a
    pyarrow.Table, a pandas or Polars DataFrame, a Hugging Face Dataset; or an iterable of dicts, which is read lazily.
    key: a column that must be there. output: a directory; patterns do not match the files of this job.

    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read or has no such column, TypeError
    for anything else, ImportError if pyarrow is needed and missing."""
    source = _open(rows, output)
    if key is not None and source.columns and key not in source.columns:
        raise ValueError(f"key={key!r}: {source.description} has no such column; {listed_columns(source)}")
    return source


def absolute_paths(rows: Any) -> Any:
    """Paths as they are meant in this directory; anything else as it is."""
    if isinstance(rows, str | os.PathLike):
        return str(Path(rows).expanduser().absolute())
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return [absolute_paths(row) for row in rows]
    return rows


def listed_columns(source: Source) -> str:
    """The source's columns, for messages about a column that is not there."""
    return f"its columns are {', '.join(source.columns)}" if source.columns else "it has no columns"


def import_arrow(what: str) -> Any:
    """The module pyarrow. what: for which it is needed. Raises ImportError with the way to install it."""
    try:
        import pyarrow
    except ImportError:
        raise ImportError(f"{what} needs pyarrow: pip install pyarrow") from None
    return pyarrow


def default_keys(source: Source, batch: RowBatch) -> npt.NDArray[np.uint64]:
    """[num_rows] hashes of the rows' numbers in their origin: the keys where the user names no column."""
    base = hash_key(source.row_origin(batch.origin))
    numbers = np.arange(batch.first_in_origin, batch.first_in_origin + batch.num_rows, dtype=np.uint64)
    # The finalizer of SplitMix64, which maps different numbers to different hashes.
    mixed = np.uint64(base) + numbers * _MIX_STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("npt.NDArray[np.uint64]", mixed ^ (mixed >> np.uint64(31)))


def column_keys(batch: RowBatch, key: str) -> tuple[npt.NDArray[np.uint64], dict[int, str]]:
    """([num_rows] hashes of the values of the key column, by index: why a row has no key that tells it apart)."""
    values = batch.column(key)
    wrong: dict[int, str] = {}
    for index, value in enumerate(values):
        if isinstance(value, str | int):
            if value == "":  # as a CSV file may have it in place of null
                wrong[index] = f"{batch.place(index)} has no key: its column {key!r} is empty"
            continue
        # also what is not the same in every process
        if isinstance(value, np.ndarray) or repr(value) == object.__repr__(value):
            wrong[index] = f"{batch.place(index)}: its key is {type(value).__name__}; allowed are texts and numbers"
        elif value is None:
            wrong[index] = f"{batch.place(index)} has no key: its column {key!r} is null"
    hashes = [0 if index in wrong else hash_key(value) for index, value in enumerate(values)]
    return np.array(hashes, np.uint64), wrong


_NEVER_MISSING = frozenset({str, int, bool, list, dict, bytes})
_MISSING_KINDS = ("NAType", "MaskedConstant")
"""pandas.NA and numpy.ma.masked, which compare to themselves as themselves."""


def is_missing(value: Any) -> bool:
    """Whether a value says that there is none: None, NaN, pandas' NaT and NA, a NaT or a masked value of NumPy, a null
    of Arrow."""
    kind = type(value)
    if value is None:
        return True
    if kind in _NEVER_MISSING:
        return False
    try:
        is_unequal = value != value
    except Exception:  # a signalling NaN cannot be compared
        return isinstance(value, decimal.Decimal)
    if isinstance(is_unequal, bool | np.bool_) and is_unequal:
        return True
    return kind.__name__ in _MISSING_KINDS or getattr(value, "is_valid", True) is False


def _without_missing(row: Row) -> Row:
    """The row with None for missing values; the same dict if it has none."""
    if not any(type(value) not in _NEVER_MISSING and value is not None and is_missing(value) for value in row.values()):
        return row
    return {name: None if is_missing(value) else value for name, value in row.items()}


def _without_nan(column: Any) -> Any:
    """An Arrow column with null for NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type) and pa.types.is_floating(column.type.value_type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def hash_key(value: object) -> int:
    """8 bytes, equal for equal values of the same type in every process."""
    if isinstance(value, np.generic):  # whose repr depends on the version of NumPy
        value = value.item()
    if isinstance(value, str):
        content = b"s" + value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        content = b"b" + value
    else:
        content = repr(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _open(rows: object, output: Path | None) -> Source:
    if isinstance(rows, str | os.PathLike):
        return _open_files([rows], output)
    module = type(rows).__module__.partition(".")[0]
    if module == "pyarrow" and hasattr(rows, "schema") and hasattr(rows, "num_rows"):
        return _open_table(rows)
    if module == "pandas" and hasattr(rows, "iloc") and hasattr(rows, "columns"):
        return _open_pandas(rows)
    if module == "polars" and hasattr(rows, "height"):
        return _open_polars(rows)
    if module == "polars" and hasattr(rows, "collect"):
        raise TypeError("rows: a Polars LazyFrame; call .collect() on it")
    if module == "datasets" and hasattr(rows, "with_format") and hasattr(rows, "__len__"):
        if isinstance(rows, Mapping):
            raise TypeError(f"rows: a DatasetDict; take one of its splits, {', '.join(map(repr, rows))}")
        return _open_dataset(rows)
    if isinstance(rows, Mapping):
        raise TypeError("rows: a dict; rows are an iterable of dicts, one for each row")
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"rows: {type(rows).__name__}; allowed are paths, data frames, Arrow tables, data sets and iterables of "
            "dicts"
        )
    if isinstance(rows, Sequence) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return _open_files(rows, output)
    return _DictSource(
        "an iterable of dicts",
        [("the rows", lambda: iter(cast("Iterable[Row]", rows)))],
        num_rows=len(cast("Sequence[object]", rows)) if hasattr(rows, "__len__") else None,
    )


# Files


def _open_files(names: Sequence[str | os.PathLike[str]], output: Path | None) -> Source:
    paths = [path for name in names for path in _matches(os.fspath(name), output)]
    repeated = {path for path in paths if paths.count(path) > 1} if len(paths) < 10_000 else set()
    if repeated:
        raise ValueError(f"{min(repeated)} is named twice")
    kinds = {_kind(path): path for path in paths}
    if len(kinds) > 1:
        several = " and ".join(f"{path} ({kind})" for kind, path in sorted(kinds.items()))
        raise ValueError(f"files of one call must be of one kind, and there are {several}")
    (kind,) = kinds
    what = f"{len(paths):,} {kind} files" if len(paths) > 1 else paths[0]
    for path in paths:
        with Path(path).open("rb"):  # raises OSError for one that cannot be read
            pass
    if kind == "JSON lines":
        return _open_json_lines(paths, what)
    if kind == "CSV" and find_spec("pyarrow") is None:
        return _open_plain_csv(paths, what)
    import_arrow(paths[0])
    readers: dict[str, type[_ColumnFile]] = {"Parquet": _ParquetFile, "CSV": _CsvFile, "Arrow": _ArrowFile}
    files: list[_ColumnFile] = []
    for path in paths:
        try:
            files.append(readers[kind](path, files[0].schema if files else None))
        except Exception as error:
            raise _unreadable(path, error) from None
    for file in files[1:]:
        _check_schema(file, files[0])
    counts = [file.num_rows for file in files]
    num_rows = None if None in counts else sum(cast("list[int]", counts))

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        for file in files:
            try:
                for batch in file.batches():
                    yield file.path, batch
            except Exception as error:
                raise _unreadable(file.path, error) from None

    errors = {file.path: file.errors for file in files if isinstance(file, _CsvFile)}
    return _ColumnSource(what, files[0].schema, num_rows, read, _join_table, paths, errors)


def _matches(name: str, output: Path | None) -> list[str]:
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


def _kind(path: str) -> str:
    kind = _KINDS.get(_suffix(Path(path).name))
    if kind is None:
        raise ValueError(f"{path}: not a known kind of file; its name must end with one of {_known_suffixes()}")
    return kind


def _known_suffixes() -> str:
    return ", ".join(_KINDS)


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, ImportError | MemoryError):
        return error
    return ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}")


class _ColumnFile(Protocol):
    path: str
    schema: pa.Schema
    num_rows: int | None

    def __init__(self, path: str, first_schema: pa.Schema | None) -> None:
        """first_schema: of the first file of the call."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]: ...


class _ParquetFile:
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


class _CsvFile:
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


class _ArrowFile:
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


def _check_schema(file: _ColumnFile, first: _ColumnFile) -> None:
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


def _open_json_lines(paths: list[str], what: str) -> Source:
    def reader(path: str) -> Callable[[], Iterator[tuple[bytes, Row] | str]]:
        return lambda: _read_json_lines(path)

    is_cheap = sum(Path(path).stat().st_size for path in paths) <= _MAX_COUNTED_BYTES
    is_compressed = any(path.endswith(".gz") for path in paths)
    num_rows = sum(map(_count_lines, paths)) if is_cheap and not is_compressed else None
    return _DictSource(what, [(path, reader(path)) for path in paths], num_rows, paths, is_json_lines=True)


@dataclass(frozen=True, slots=True)
class _BadRow:
    """A row that cannot be answered or stored as it came."""

    why: str
    values: Row


def _open_plain_csv(paths: list[str], what: str) -> Source:
    """CSV files without pyarrow: every value is a text, and one that is empty is missing."""
    names = _csv_header(paths[0])
    for path in paths[1:]:
        if _csv_header(path) != names:
            raise ValueError(f"files of one call must have equal columns: those of {paths[0]} and {path} differ")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"{what} has two columns {repeated[0]!r}")

    def reader(path: str) -> Callable[[], Iterator[Row | _BadRow]]:
        return lambda: (_csv_row(names, values) for values in _csv_rows(path, num_skipped=1))

    return _DictSource(what, [(path, reader(path)) for path in paths], None, paths, columns=names)


def _csv_header(path: str) -> list[str]:
    return next(_csv_rows(path), [])


def _csv_rows(path: str, num_skipped: int = 0) -> Iterator[list[str]]:
    """Rows that are not empty, bytes that are not UTF-8 as half surrogate pairs. Raises ValueError."""
    csv.field_size_limit(MAX_BATCH_BYTES)
    try:
        with io.TextIOWrapper(_open_binary(path), "utf-8-sig", "surrogateescape", newline="") as file:
            rows = (values for values in csv.reader(file) if values)
            yield from islice(rows, num_skipped, None)
    except (OSError, EOFError, csv.Error) as error:
        raise _unreadable(path, error) from None


def _csv_row(names: list[str], values: list[str]) -> Row | _BadRow:
    if len(values) != len(names):
        has = "1 value" if len(values) == 1 else f"{len(values)} values"
        return _BadRow(f"it has {has}, and the file has {len(names)} columns", dict.fromkeys(names))
    row: Row = {name: value or None for name, value in zip(names, values, strict=True)}
    for name, value in row.items():
        if value is not None and not value.isascii():
            raw = value.encode(errors="surrogateescape")
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                shown = {**row, name: raw.decode(errors="replace")}
                return _BadRow(f"its column {name!r} is not UTF-8: {error}", without_surrogates(shown))
    return row


def _open_binary(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else Path(path).open("rb")


def _count_lines(path: str) -> int:
    count, last = 0, b"\n"
    with _open_binary(path) as file:
        while part := file.read(1 << 20):
            count += part.count(b"\n")
            last = part[-1:]
    return count + (last != b"\n")


def _read_json_lines(path: str) -> Iterator[tuple[bytes, Row] | str]:
    """Yields (text, row) for each line that is not empty, or why it is no row. Raises ValueError if the file cannot be
    read."""
    number = 0
    try:
        with _open_binary(path) as file:
            for number, line in enumerate(file, 1):
                # editors of Windows write a byte-order mark at the start of a file
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if text:
                    yield _parse_line(text, path, number)
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


def to_json(row: object) -> bytes:
    """JSON text; halves of surrogate pairs, which JSON readers refuse, become U+FFFD. Raises TypeError."""
    try:
        return dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return dumps(without_surrogates(row), option=orjson.OPT_SERIALIZE_NUMPY)


def without_surrogates(value: Any) -> Any:
    """The value with U+FFFD for each half of a surrogate pair."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


class _DictSource:
    """Rows that are dicts."""

    schema = None

    def __init__(
        self,
        description: str,
        parts: Sequence[tuple[str, Callable[[], Iterator[Any]]]],
        num_rows: int | None,
        paths: Sequence[str] = (),
        is_json_lines: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        """parts: (origin, opens its rows: dicts or bad rows, or of JSON lines (text, dict) or why a line is no row).
        columns: if they are known.

        Raises TypeError or ValueError if none of the first rows is one: then these are hardly rows. Beside rows, what
        is none is an error of its row."""
        self.description = description
        self.num_rows = num_rows
        self.is_json_lines = is_json_lines
        self.keep_rows = False
        self._kept: list[Row] = []
        self.paths = paths
        self._short_names = _short_names(paths)
        self._batches = self._read(parts)
        self._first: list[RowBatch] = []
        """Batches up to the first one with a row."""
        for batch in self._batches:
            self._first.append(batch)
            if len(batch.errors) < batch.num_rows or batch.first_number + batch.num_rows >= _FIRST_BATCH_ROWS:
                break
        if self._first and all(len(batch.errors) == batch.num_rows for batch in self._first):
            raise (ValueError if paths else TypeError)(self._first[0].errors[0])
        first_rows = (row for batch in self._first for row in batch.dicts or [])
        self.columns = list(columns or dict.fromkeys(name for row in first_rows for name in row))

    def batches(self) -> Iterator[RowBatch]:
        first, self._first = self._first, []
        for batch in chain(first, self._batches):
            if self.keep_rows:
                self._kept += batch.given or []
            batch.given = None
            yield batch

    def row_origin(self, origin: str) -> str:
        return self._short_names.get(origin, "")

    def joined(self, answers: Sequence[AnswerColumn]) -> list[Row]:
        joined = [dict(row) for row in self._kept]
        for column in answers:
            for row, value in zip(joined, column.values, strict=True):
                row[column.name] = value
        return joined

    def _read(self, parts: Sequence[tuple[str, Callable[[], Iterator[Any]]]]) -> Iterator[RowBatch]:
        number = 0
        batch_rows = _FIRST_BATCH_ROWS
        for origin, open_rows in parts:
            rows = open_rows()
            in_origin = 0
            while taken := _take(rows, batch_rows):
                batch = RowBatch(number, origin, in_origin, len(taken))
                if self.is_json_lines:
                    for index, line in enumerate(taken):
                        if isinstance(line, str):
                            batch.errors[index] = line
                            taken[index] = b"{}", {}
                    batch.lines = [text for text, _ in taken]
                    batch.dicts = batch.given = [row for _, row in taken]
                    batch_rows = _next_rows(sum(len(text) for text, _ in taken), len(taken))
                else:
                    for index, row in enumerate(taken):
                        if isinstance(row, _BadRow):
                            batch.errors[index], taken[index] = f"{batch.place(index)}: {row.why}", row.values
                        elif not isinstance(row, dict):
                            if not isinstance(row, Mapping):
                                batch.errors[index] = f"{batch.place(index)} is not a dict, but {type(row).__name__}"
                            taken[index] = dict(row) if isinstance(row, Mapping) else {}
                    batch.given, batch.dicts = taken, [_without_missing(row) for row in taken]
                    batch_rows = _next_rows(sum(map(_text_bytes, taken)), len(taken))
                number += len(taken)
                in_origin += len(taken)
                yield batch


def _take(rows: Iterator[Any], count: int) -> list[Any]:
    """The next rows, at most `count`; fewer if they take long."""
    taken = []
    deadline = time.monotonic() + _MAX_READ_S
    for row in rows:
        taken.append(row)
        if len(taken) == count or time.monotonic() > deadline:
            break
    return taken


def _text_bytes(row: Row) -> int:
    """A lower bound of a row's memory."""
    return sum(len(value) for value in row.values() if isinstance(value, str | bytes | list))


def _next_rows(num_bytes: int, num_rows: int) -> int:
    """Rows of the next batch."""
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES * num_rows // max(1, num_bytes)))


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path below the directory that all have in common, which may then be moved."""
    if not paths:
        return {}
    parents = [str(Path(path).absolute().parent) for path in paths]
    common = os.path.commonpath(parents)
    return {path: os.path.relpath(Path(path).absolute(), common) for path in paths}


# Columns


class _ColumnSource:
    """Rows that come as Arrow batches."""

    is_json_lines = False

    def __init__(
        self,
        description: str,
        schema: pa.Schema,
        num_rows: int | None,
        read: Callable[[], Iterator[tuple[str, pa.RecordBatch]]],
        join: Callable[[_ColumnSource, Sequence[AnswerColumn]], object],
        paths: Sequence[str] = (),
        errors: Mapping[str, dict[int, str]] | None = None,
    ) -> None:
        """read: (origin, batch of any size) for all rows, in order. errors: by origin and number of a row in it, why it
        cannot be answered; read may add errors of a batch before it gives the batch."""
        self.description = description
        self.schema = schema
        self.num_rows = num_rows
        self.columns = list(schema.names)
        self.keep_rows = False
        self.paths = paths
        self._short_names = _short_names(paths)
        self._read = read
        self._join = join
        self._errors = errors or {}
        repeated = [name for name in self.columns if self.columns.count(name) > 1]
        if repeated:
            raise ValueError(f"{description} has two columns {repeated[0]!r}")

    def tables(self) -> Iterator[pa.RecordBatch]:
        """All rows, as they are read."""
        return (batch for _, batch in self._read())

    def batches(self) -> Iterator[RowBatch]:
        number = in_origin = 0
        last_origin = None
        for origin, batch in self._read():
            if origin != last_origin:
                last_origin, in_origin = origin, 0
            start = 0
            while start < batch.num_rows:
                part = batch.slice(start, _next_rows(batch.nbytes, batch.num_rows))
                rows = RowBatch(number, origin, in_origin, part.num_rows)
                rows.table = part
                errors = self._errors.get(origin)
                if errors:
                    indices = [index for index in range(part.num_rows) if in_origin + index in errors]
                    rows.errors = {index: f"{rows.place(index)}: {errors.pop(in_origin + index)}" for index in indices}
                yield rows
                start += part.num_rows
                number += part.num_rows
                in_origin += part.num_rows

    def row_origin(self, origin: str) -> str:
        return self._short_names.get(origin, "")

    def joined(self, answers: Sequence[AnswerColumn]) -> object:
        return self._join(self, answers)


def _slices(num_rows: int) -> Iterator[slice]:
    """Parts of a frame that are turned into Arrow batches one at a time."""
    return (slice(start, min(start + MAX_BATCH_ROWS, num_rows)) for start in range(0, num_rows, MAX_BATCH_ROWS))


def _arrow_indices(indices: npt.NDArray[np.int64]) -> pa.Array:
    import pyarrow as pa

    return pa.array(indices)


def _join_table(source: _ColumnSource, answers: Sequence[AnswerColumn]) -> pa.Table:
    import pyarrow as pa

    table = pa.Table.from_batches(source.tables(), source.schema)
    for column in answers:
        table = table.append_column(column.name, column.array())
    return table


def _open_table(table: Any) -> Source:
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise TypeError(f"rows: a pyarrow {type(table).__name__}; allowed is a Table or a RecordBatch")

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        return (("the table", batch) for batch in table.to_batches())

    return _ColumnSource("a pyarrow Table", table.schema, table.num_rows, read, _join_table)


def _open_pandas(frame: Any) -> Source:
    import_arrow("a data frame")
    import pandas
    import pyarrow as pa

    named_index = [name for name in frame.index.names if name is not None]
    flat = frame.reset_index() if named_index else frame.copy(deep=False)
    flat.columns = [str(name) for name in flat.columns]  # as they are in Arrow
    errors: dict[int, str] = {}
    try:
        schema = pa.Schema.from_pandas(flat, preserve_index=False)
    except (UnicodeEncodeError, pa.ArrowException):
        errors = _replace_surrogates(flat)
        schema = pa.Schema.from_pandas(flat, preserve_index=False)
    schema = schema.remove_metadata()

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        for part in _slices(len(flat)):
            batch = pa.RecordBatch.from_pandas(flat.iloc[part], schema=schema, preserve_index=False)
            yield "the DataFrame", batch.replace_schema_metadata(None)

    def join(_: _ColumnSource, answers: Sequence[AnswerColumn]) -> object:
        joined = frame.copy(deep=False)
        for column in answers:
            values = list(column.values)
            if column.field == "seed":  # which would be rounded to float64 beside a null
                joined[column.name] = pandas.array(values, "UInt64")
            else:
                joined[column.name] = values
        return joined

    return _ColumnSource("a pandas DataFrame", schema, len(flat), read, join, errors={"the DataFrame": errors})


def _replace_surrogates(frame: Any) -> dict[int, str]:
    """Put U+FFFD in place of halves of surrogate pairs, which Arrow cannot have. Returns, by the number of a row, in
    which column it had one. Raises ValueError for a column that has no one type."""
    import pandas
    import pyarrow as pa

    errors: dict[int, str] = {}
    for name in frame.columns:
        try:
            pa.array(frame[name], from_pandas=True)
        except UnicodeEncodeError:
            values = [value.tolist() if isinstance(value, np.ndarray) else value for value in frame[name]]
        except pa.ArrowException as error:
            reason = f"column {name!r}: {error}"
            raise ValueError(f"the pandas DataFrame cannot become columns of one type each: {reason}") from None
        else:
            continue
        for number, value in enumerate(values):
            if isinstance(value, str | list | tuple | dict):
                values[number] = without_surrogates(value)
                if values[number] != value:
                    errors[number] = f"its column {name!r} has half of a surrogate pair, which no UTF-8 text has"
        frame[name] = pandas.Series(values, frame.index, dtype=object)
    return errors


def _open_polars(frame: Any) -> Source:
    import_arrow("a data frame")
    import polars

    def to_arrow(part: Any) -> Any:
        return part.to_arrow(compat_level=polars.CompatLevel.oldest())

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        for part in _slices(frame.height):
            for batch in to_arrow(frame[part]).combine_chunks().to_batches():
                yield "the DataFrame", batch

    def join(_: _ColumnSource, answers: Sequence[AnswerColumn]) -> object:
        return frame.with_columns(polars.Series(column.name, column.array()) for column in answers)

    return _ColumnSource("a Polars DataFrame", to_arrow(frame.head(0)).schema, frame.height, read, join)


def _open_dataset(dataset: Any) -> Source:
    import_arrow("a data frame")
    import datasets
    import pyarrow as pa

    columns = dataset.with_format("arrow")

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        for part in _slices(len(dataset)):
            for batch in columns[part].combine_chunks().to_batches():
                yield "the Dataset", batch.cast(schema) if batch.schema != schema else batch

    def join(_: _ColumnSource, answers: Sequence[AnswerColumn]) -> object:
        joined = dataset
        for column in answers:
            feature = datasets.Features.from_arrow_schema(pa.schema([(column.name, column.kind())]))[column.name]
            # add_column has feature= from version 3.0 on
            joined = joined.add_column(column.name, list(column.values)).cast_column(column.name, feature)
        return joined

    schema = dataset.features.arrow_schema
    return _ColumnSource("a Dataset", schema, len(dataset), read, join)
