"""Rows from whatever the user has: files, data frames, Arrow tables, data sets, iterables of dicts.

pyarrow is imported late: JSON lines and dicts need it only when their output is Parquet, and CSV files are read without
it where it is not installed; their values are texts then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tokasaurus.library.map.answers import AnswerColumn
from tokasaurus.library.map.files import (
    ArrowFile,
    ColumnFile,
    CsvFile,
    ParquetFile,
    check_schema,
    count_lines,
    csv_header,
    csv_row,
    csv_rows,
    kind_of,
    matching_files,
    read_json_lines,
    unreadable,
)
from tokasaurus.library.map.rows import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    BadRow,
    Row,
    RowBatch,
    Source,
    import_arrow,
    listed_columns,
    without_missing,
    without_surrogates,
)

if TYPE_CHECKING:
    import pyarrow as pa

    Rows = str | Path | Sequence[str] | Sequence[Path] | Iterable[Mapping[str, Any]] | pa.Table | Any
    """Paths, data frames, Arrow tables, data sets or dicts."""

_FIRST_BATCH_ROWS = 512
_MAX_READ_S = 1.0
"""An iterable that takes longer for a batch gives a smaller one."""

_MAX_COUNTED_BYTES = 2 << 30
"""Most bytes of JSON-lines files whose lines are counted before they are read."""


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


def _open_files(names: Sequence[str | os.PathLike[str]], output: Path | None) -> Source:
    paths = [path for name in names for path in matching_files(os.fspath(name), output)]
    repeated = {path for path in paths if paths.count(path) > 1} if len(paths) < 10_000 else set()
    if repeated:
        raise ValueError(f"{min(repeated)} is named twice")
    kinds = {kind_of(path): path for path in paths}
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
    readers: dict[str, type[ColumnFile]] = {"Parquet": ParquetFile, "CSV": CsvFile, "Arrow": ArrowFile}
    files: list[ColumnFile] = []
    for path in paths:
        try:
            files.append(readers[kind](path, files[0].schema if files else None))
        except Exception as error:
            raise unreadable(path, error) from None
    for file in files[1:]:
        check_schema(file, files[0])
    counts = [file.num_rows for file in files]
    num_rows = None if None in counts else sum(cast("list[int]", counts))

    def read() -> Iterator[tuple[str, pa.RecordBatch]]:
        for file in files:
            try:
                for batch in file.batches():
                    yield file.path, batch
            except Exception as error:
                raise unreadable(file.path, error) from None

    errors = {file.path: file.errors for file in files if isinstance(file, CsvFile)}
    return _ColumnSource(what, files[0].schema, num_rows, read, _join_table, paths, errors)


def _open_json_lines(paths: list[str], what: str) -> Source:
    def reader(path: str) -> Callable[[], Iterator[tuple[bytes, Row] | str]]:
        return lambda: read_json_lines(path)

    is_cheap = sum(Path(path).stat().st_size for path in paths) <= _MAX_COUNTED_BYTES
    is_compressed = any(path.endswith(".gz") for path in paths)
    num_rows = sum(map(count_lines, paths)) if is_cheap and not is_compressed else None
    return _DictSource(what, [(path, reader(path)) for path in paths], num_rows, paths, is_json_lines=True)


def _open_plain_csv(paths: list[str], what: str) -> Source:
    """CSV files without pyarrow: every value is a text, and one that is empty is missing."""
    names = csv_header(paths[0])
    for path in paths[1:]:
        if csv_header(path) != names:
            raise ValueError(f"files of one call must have equal columns: those of {paths[0]} and {path} differ")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"{what} has two columns {repeated[0]!r}")

    def reader(path: str) -> Callable[[], Iterator[Row | BadRow]]:
        return lambda: (csv_row(names, values) for values in csv_rows(path, num_skipped=1))

    return _DictSource(what, [(path, reader(path)) for path in paths], None, paths, columns=names)


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
                        if isinstance(row, BadRow):
                            batch.errors[index], taken[index] = f"{batch.place(index)}: {row.why}", row.values
                        elif not isinstance(row, dict):
                            if not isinstance(row, Mapping):
                                batch.errors[index] = f"{batch.place(index)} is not a dict, but {type(row).__name__}"
                            taken[index] = dict(row) if isinstance(row, Mapping) else {}
                    batch.given, batch.dicts = taken, [without_missing(row) for row in taken]
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
