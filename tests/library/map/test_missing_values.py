"""A row whose column is missing has the same outcome in whatever form the rows are given, and whatever says so."""

import csv
import decimal
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.library.map.helpers.calls import call_map
from tests.library.map.helpers.finished import read_output
from tokasaurus.library.map.rows import is_missing

MISSING = {
    "None": None,
    "NaN": math.nan,
    "NaN of NumPy": np.float32("nan"),
    "pandas.NA": pandas.NA,
    "pandas.NaT": pandas.NaT,
    "NaT of NumPy": np.datetime64("NaT"),
    "difference of NumPy": np.timedelta64("NaT"),
    "decimal": decimal.Decimal("nan"),
    "masked": np.ma.masked,
    "null of Arrow": pa.scalar(None, pa.int64()),
}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "q": "one", "share": 0.5},
    {"id": None, "q": "two", "share": 1.5},
    {"id": "b", "q": None, "share": 2.5},
    {"id": "c", "q": "three", "share": None},
    {"id": None, "q": "four", "share": 3.5},
    {"id": "nan", "q": "NA", "share": 4.5},
]
TABLE = pa.Table.from_pylist(ROWS)


def parquet(folder: Path) -> object:
    pq.write_table(TABLE, folder / "rows.parquet")
    return folder / "rows.parquet"


def parquet_of_pandas(folder: Path) -> object:
    pandas.DataFrame(ROWS).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def json_lines(folder: Path) -> object:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "rows.jsonl"


def json_lines_of_pandas(folder: Path) -> object:
    pandas.DataFrame(ROWS).to_json(folder / "rows.jsonl", orient="records", lines=True)
    return folder / "rows.jsonl"


def csv_of_python(folder: Path) -> object:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "rows.csv"


def csv_of_pandas(folder: Path) -> object:
    pandas.DataFrame(ROWS).to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def csv_of_arrow(folder: Path) -> object:
    pyarrow.csv.write_csv(TABLE, folder / "rows.csv")
    return folder / "rows.csv"


def csv_of_polars(folder: Path) -> object:
    polars.DataFrame(ROWS).write_csv(folder / "rows.csv")
    return folder / "rows.csv"


def csv_with_nan_in_words(folder: Path) -> object:
    frame = pandas.DataFrame(ROWS)
    frame["share"] = frame["share"].astype(object).where(frame["share"].notna(), "NaN")
    frame.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def hugging_face_dataset(_: Path) -> object:
    datasets = pytest.importorskip("datasets", reason="not installed: it is large")
    return datasets.Dataset.from_list(ROWS)


def table_with_nan(_: Path) -> object:
    share = pc.fill_null(TABLE["share"], math.nan)
    return TABLE.set_column(2, "share", share)


def table_with_a_dictionary(_: Path) -> object:
    share = pc.fill_null(TABLE["share"], math.nan).dictionary_encode()
    return TABLE.set_column(2, "share", share)


FORMS: dict[str, Callable[[Path], object]] = {
    **{f"dicts with {name}": lambda _, value=value: with_missing(value) for name, value in MISSING.items()},
    "iterator": lambda _: iter(with_missing(math.nan)),
    "parquet": parquet,
    "parquet of pandas": parquet_of_pandas,
    "JSON lines": json_lines,
    "JSON lines of pandas": json_lines_of_pandas,
    "CSV of Python": csv_of_python,
    "CSV of pandas": csv_of_pandas,
    "CSV of Arrow": csv_of_arrow,
    "CSV of Polars": csv_of_polars,
    "CSV with NaN in words": csv_with_nan_in_words,
    "table": lambda _: TABLE,
    "table with NaN": table_with_nan,
    "table with a dictionary": table_with_a_dictionary,
    "pandas": lambda _: pandas.DataFrame(ROWS),
    "pandas with its own types": lambda _: pandas.DataFrame(ROWS).convert_dtypes(),
    "pandas with NaT": lambda _: pandas.DataFrame(with_missing(pandas.NaT), dtype=object),
    "polars": lambda _: polars.DataFrame(ROWS),
    "polars with NaN": lambda _: polars.DataFrame(ROWS).with_columns(polars.col("share").fill_null(math.nan)),
    "dataset": hugging_face_dataset,
}


def with_missing(value: object) -> list[dict[str, Any]]:
    return [{name: value if member is None else member for name, member in row.items()} for row in ROWS]


def answered(form: str, folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The rows of the output, in the order of ROWS."""
    call_map(FORMS[form](folder), folder / "out", **arguments)
    order = [row["q"] for row in ROWS]
    return sorted(read_output(folder / "out"), key=lambda row: order.index(row["q"]))


def outcome(row: dict[str, Any]) -> str:
    """The answer, or the column that the error names."""
    return row["answer"] if row["error"] is None else row["error"].partition("column ")[2].partition(" is null")[0]


def wanted(prompt: str) -> str:
    return f"{prompt} → {len(prompt)}"


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_value_of_a_template_is_an_error_that_names_its_column(form: str, tmp_path: Path) -> None:
    rows = answered(form, tmp_path, prompt="{q} {share}")
    assert [outcome(row) for row in rows] == [
        "'q'" if row["q"] is None else "'share'" if row["share"] is None else wanted(f"{row['q']} {row['share']}")
        for row in ROWS
    ]
    for row, given in zip(rows, ROWS, strict=True):
        stored = {name: None if is_missing(row[name]) else row[name] for name in given}
        assert stored == given, "a missing value that is not asked is no error of the output"


@pytest.mark.parametrize("form", FORMS)
def test_a_function_of_the_row_sees_none_for_a_missing_value(form: str, tmp_path: Path) -> None:
    seen = answered(form, tmp_path, prompt=lambda row: repr(list(map(row.get, ROWS[0]))))
    assert [outcome(row) for row in seen] == [wanted(repr(list(row.values()))) for row in ROWS]


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_a_key_are_errors_each(form: str, tmp_path: Path) -> None:
    rows = answered(form, tmp_path, prompt="q", key="id")
    assert [outcome(row) for row in rows] == [
        "'id'" if row["id"] is None else "'q'" if row["q"] is None else wanted(row["q"]) for row in ROWS
    ]


@pytest.mark.parametrize("name", MISSING)
def test_a_function_that_returns_a_missing_value_gives_no_prompt(name: str) -> None:
    (row,) = call_map([{"q": "x"}], prompt=lambda _: MISSING[name])
    assert row["error"].startswith("there is no prompt: it is ")


@pytest.mark.parametrize("name", MISSING)
def test_rows_that_come_back_have_the_values_that_were_given(name: str) -> None:
    given = with_missing(MISSING[name])
    for row, joined in zip(given, call_map(given, prompt="q"), strict=True):
        assert all(joined[column] is value for column, value in row.items())


VALUES = ["", "nan", 0, 0.0, False, [], {}, b"", math.inf, np.int64(0), np.array([math.nan]), np.array([])]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_is_a_value_is_not_missing(value: object) -> None:
    assert not is_missing(value)
