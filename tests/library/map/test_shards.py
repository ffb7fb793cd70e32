"""Files of the output have the rows' columns with their types, and the answers beside them."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from tests.library.map.helpers.finished import finished_rows, rows_of, shard_format
from tokasaurus.library.map.answers import AnswerNames, answer_names
from tokasaurus.library.map.rows import RowBatch
from tokasaurus.library.map.shards import (
    MAX_SHARD_ROWS,
    MapRow,
    OpenShard,
    RowMisfit,
    make_format,
)
from tokasaurus.library.map.sources import open_source

ROWS = [{"id": number, "q": f"question {number}", "tags": ["x", None]} for number in range(3_000)]


def with_answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "answer": f"a{number}" if number % 10 else None,
            "finish_reason": "stop" if number % 10 else None,
            "error": None if number % 10 else f"e{number}",
        }
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize("given", ["table", "dicts"])
@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_a_file_has_rows_and_answers_in_the_order_of_the_source(given: str, format_name: str, tmp_path: Path) -> None:
    source = open_source(pa.Table.from_pylist(ROWS) if given == "table" else ROWS)
    output = shard_format(source, format_name)
    rows = finished_rows(source, output)
    np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
    path = tmp_path / f"part{output.suffix}"
    output.write(path, rows)
    if format_name == "parquet":
        assert pq.read_table(path).to_pylist() == with_answers(ROWS)
        assert polars.read_parquet(path).to_dicts() == with_answers(ROWS)
    else:
        assert [json.loads(line) for line in path.read_text().splitlines()] == with_answers(ROWS)
        assert polars.read_ndjson(path).to_dicts() == with_answers(ROWS)


def test_columns_keep_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([1_000, None, 3], pa.timestamp("us", "UTC")),
            "small": pa.array([1, 2, 3], pa.int8()),
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "nested": pa.array([{"x": 1.5, "y": [1]}, None, {"x": None, "y": []}]),
        }
    )
    source = open_source(table)
    output = shard_format(source)
    output.write(tmp_path / "part.parquet", finished_rows(source, output))
    written = pq.read_table(tmp_path / "part.parquet")
    assert written.select(table.column_names).equals(table)
    assert [(field.name, field.type) for field in written.schema][-3:] == [
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
    ]


def test_several_samples_are_lists(tmp_path: Path) -> None:
    source = open_source([{"q": "x"}, {"q": "y"}])
    output = make_format("parquet", source, answer_names(source.columns, "m_"), is_list=True)
    (batch,) = source.batches()
    output.prepare(batch)
    rows = [
        MapRow(0, batch, 0, 1, 1, ["a", "b"], ["stop", "length"]),
        MapRow(1, batch, 1, 2, 2, error="too long"),
    ]
    output.write(tmp_path / "part.parquet", rows)
    assert pq.read_table(tmp_path / "part.parquet").to_pylist() == [
        {"q": "x", "m_answer": ["a", "b"], "m_finish_reason": ["stop", "length"], "m_error": None},
        {"q": "y", "m_answer": None, "m_finish_reason": None, "m_error": "too long"},
    ]


def test_json_rows_keep_their_text(tmp_path: Path) -> None:
    lines = ['{"big": 123456789012345678901234567890, "x": 1.0e2}', "{ }", '{"u": "\\u00e9"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    source = open_source(tmp_path / "in.jsonl")
    output = shard_format(source, "jsonl")
    output.write(tmp_path / "out.jsonl", finished_rows(source, output))
    assert (tmp_path / "out.jsonl").read_text().split("\n") == [
        '{"big": 123456789012345678901234567890, "x": 1.0e2,"answer":null,"finish_reason":null,"error":"e0"}',
        '{"answer":"a1","finish_reason":"stop","error":null}',
        '{"u": "\\u00e9","answer":"a2","finish_reason":"stop","error":null}',
        "",
    ]


def test_a_column_named_as_an_answer_is_refused_with_the_way_out() -> None:
    assert answer_names(["q"], "") == AnswerNames("answer", "finish_reason", "error")
    with pytest.raises(ValueError, match=r"have a column 'error' already.*prefix='model_' names it 'model_error'"):
        answer_names(["q", "error"], "")
    assert answer_names(["q", "answer"], "m_").answer == "m_answer"
    with pytest.raises(ValueError, match="'m_answer' already"):
        answer_names(["m_answer"], "m_")
    source = open_source([{"q": 1}, {"q": 2, "answer": 3}])
    output = make_format("jsonl", source, AnswerNames("answer", "finish_reason", "error"), False)
    batch = next(source.batches())
    output.prepare(batch)
    assert list(batch.errors) == [1]
    assert re.search(r"row 1 of the rows has a column 'answer'.*prefix=", batch.errors[1])
    assert batch.lines == [b'{"q":1}', b'{"q":2}']


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ({"a": 1}, {"a": "x"}, r"row 1 of the rows: its column 'a' is 'x' \(str\).*format='jsonl'"),
        ({"a": 1}, {"a": 1, "b": 2}, r"row 1 of the rows has a column 'b', which the first rows lack.*format='jsonl'"),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": 2}}, r"row 1 of the rows: its column 'a' is \{'x': 1, 'y': 2\}"),
        ({"a": [{"x": 1}]}, {"a": [{"y": 2}]}, r"row 1 of the rows: its column 'a'"),
        ({"a": 1}, {"a": 2**70}, "row 1 of the rows: its column 'a'"),
        ({"a": "x"}, {"a": b"\xff"}, "row 1 of the rows: its column 'a'"),
    ],
)
def test_a_row_that_does_not_fit_the_first_ones_is_an_error(
    first: Any, second: Any, match: str, tmp_path: Path
) -> None:
    source = open_source([first])
    output = shard_format(source)
    rows = finished_rows(source, output)
    output.write(tmp_path / "first.parquet", rows)
    later = RowBatch(1, "the rows", 1, 1)
    later.dicts = [second]
    output.prepare(later)
    assert list(later.errors) == [0]
    assert re.search(match, later.errors[0])
    assert "\n" not in later.errors[0]
    assert later.table is not None
    fitting = {name: value for name, value in second.items() if name != "a" or "'b'" in match}
    assert later.table.to_pylist() == [{"a": None, **{name: fitting[name] for name in fitting if name == "a"}}]


def test_first_rows_that_do_not_go_together_are_named() -> None:
    source = open_source([{"a": 1}] * 300 + [{"a": "x"}] + [{"a": 2}] * 10)
    batch = next(source.batches())
    shard_format(source).prepare(batch)
    assert re.match(r"row 300 of the rows: its column 'a' is 'x' \(str\)", batch.errors.pop(300))
    assert batch.errors == {}
    source = open_source([{"a": 1}, *({"a": "x"} for _ in range(10))])
    with pytest.raises(RowMisfit, match=r"row 1 of the rows: its column 'a' is 'x' \(str\).*format='jsonl'"):
        shard_format(source).prepare(next(source.batches()))


@pytest.mark.parametrize(
    ("null", "later", "stored"),
    [
        (None, 5, "5"),
        (None, "text", "text"),
        (None, {"x": [1, None]}, '{"x":[1,null]}'),
        ([], [1, 2], ["1", "2"]),
        ([], ["a"], ["a"]),
        ({}, {"x": 1}, '{"x":1}'),
        ({"x": None}, {"x": 2.5}, {"x": "2.5"}),
        ([{"x": None}], [{"x": True}], [{"x": "true"}]),
    ],
)
def test_a_column_that_is_null_at_first_has_one_type_in_all_files(
    null: Any, later: Any, stored: Any, tmp_path: Path
) -> None:
    """It may get its type until the first file is written, and is text afterwards; readers take all files as one."""
    for number, rows in enumerate(([null] * 600, [null] * 600 + [later])):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = open_source({"id": index, "a": value} for index, value in enumerate([*rows, later]))
        output = shard_format(source)
        batches = source.batches()
        first = list(itertools.islice(batches, 1)) if number == 0 else list(batches)
        for part, group in enumerate((first, list(batches))):
            members = [member for batch in group for member in rows_of(batch, output)]
            if members:
                output.write(folder / f"part-{part}.parquet", members)
        expected = [stored] if number == 0 else [later, later]
        for read in (dataset.dataset(folder).to_table().to_pylist(), polars.scan_parquet(folder).collect().to_dicts()):
            assert [row["id"] for row in read] == list(range(len(rows) + 1))
            values = [row["a"] for row in read]
            assert values[-len(expected) :] == expected


def test_a_later_call_has_the_types_of_the_first_file(tmp_path: Path) -> None:
    source = open_source([{"a": None, "b": 1}])
    first = shard_format(source)
    first.write(tmp_path / "part-0.parquet", finished_rows(source, first))
    source = open_source([{"a": 7, "b": None}, {"a": "x", "b": "no number"}])
    later = shard_format(source)
    later.begin(tmp_path / "part-0.parquet")
    later.write(tmp_path / "part-1.parquet", finished_rows(source, later))
    assert pq.read_schema(tmp_path / "part-1.parquet").equals(pq.read_schema(tmp_path / "part-0.parquet"))
    rows = pq.read_table(tmp_path / "part-1.parquet").to_pylist()
    assert [(row["a"], row["b"]) for row in rows] == [("7", None), ("x", None)]


def test_values_that_json_lacks_are_named() -> None:
    source = open_source([{"a": "x", "b": 1}, {"a": "x", "b": b"\x00"}])
    batch = next(source.batches())
    shard_format(source, "jsonl").prepare(batch)
    assert re.match(r"row 1 of the rows: its column 'b' is bytes.*format='parquet'", batch.errors.pop(1))
    assert batch.lines == [b'{"a":"x","b":1}', b'{"a":"x","b":null}']


@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_half_a_surrogate_pair_is_stored_as_a_replacement(format_name: str, tmp_path: Path) -> None:
    source = open_source([{"q": "a\ud800b", "l": ["\udfff"]}, {"q": "fine", "l": []}])
    output = shard_format(source, format_name)
    path = tmp_path / f"part{output.suffix}"
    output.write(path, finished_rows(source, output))
    read = polars.read_parquet(path) if format_name == "parquet" else polars.read_ndjson(path)
    assert read["q"].to_list() == ["a\ufffdb", "fine"]
    assert read["l"].to_list() == [["\ufffd"], []]


def test_a_batch_frees_rows_and_still_finds_the_others(tmp_path: Path) -> None:
    source = open_source(pa.Table.from_pylist(ROWS[:500]))
    output = shard_format(source)
    rows = finished_rows(source, output)
    (batch,) = {id(row.batch): row.batch for row in rows}.values()
    kept = [row for row in rows if row.number % 100 == 17]
    batch.keep_only(np.array([row.index for row in kept]))
    assert batch.table is not None
    assert batch.table.num_rows == 5
    batch.keep_only(np.array([row.index for row in kept[:2]]))
    assert batch.table.num_rows == 2
    output.write(tmp_path / "part.parquet", kept[:2])
    assert pq.read_table(tmp_path / "part.parquet")["id"].to_pylist() == [17, 117]


def test_a_shard_is_full_by_rows_and_by_bytes_and_old_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source([{"q": "x"}])
    rows = finished_rows(source, shard_format(source))
    shard = OpenShard()
    assert shard.seconds_left() == 60.0
    for _ in range(MAX_SHARD_ROWS):
        assert not shard.is_full()
        shard.add(rows[0], 100.0)
    assert shard.is_full()
    shard = OpenShard()
    for _ in range(63):
        shard.add(rows[0], 1 << 20)
    assert not shard.is_full()
    shard.add(rows[0], 1 << 20)
    assert shard.is_full()
    now_s = 1e9
    monkeypatch.setattr("tokasaurus.library.map.shards.time.monotonic", lambda: now_s)
    shard = OpenShard()
    shard.add(rows[0], 1.0)
    now_s += 61.0
    shard.add(rows[0], 1.0)
    assert shard.seconds_left() == -1.0
