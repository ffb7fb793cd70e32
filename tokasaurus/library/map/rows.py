"""Rows of a source, in batches; their keys, missing values and JSON text.

pyarrow is imported late: JSON lines, dicts and CSV files are read without it.
"""

from __future__ import annotations

import decimal
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import orjson

from tokasaurus.library.map.answers import AnswerColumn
from tokasaurus.text.exact_json import dumps

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

MAX_BATCH_ROWS = 1024
MAX_BATCH_BYTES = 8 << 20
"""Most bytes of a batch, estimated from the size of the rows before it."""

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
        columns_without_nan = [without_nan(column) for column in table.columns]
        return cast("list[Row]", table.from_arrays(columns_without_nan, table.schema.names).to_pylist())

    def column(self, name: str) -> list[Any]:
        """None for missing values, and where a dict lacks it."""
        if self.dicts is not None:
            return [row.get(name) for row in self.dicts]
        assert self.table is not None
        return cast("list[Any]", without_nan(self.table.column(name)).to_pylist())

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


def without_missing(row: Row) -> Row:
    """The row with None for missing values; the same dict if it has none."""
    if not any(type(value) not in _NEVER_MISSING and value is not None and is_missing(value) for value in row.values()):
        return row
    return {name: None if is_missing(value) else value for name, value in row.items()}


def without_nan(column: Any) -> Any:
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


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be answered or stored as it came."""

    why: str
    values: Row


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


def _arrow_indices(indices: npt.NDArray[np.int64]) -> pa.Array:
    import pyarrow as pa

    return pa.array(indices)
