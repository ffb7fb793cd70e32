"""Every kind of source gives the same rows, in order, and joins answers to the type that came in."""

import codecs
import csv
import datetime
import decimal
import gzip
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from tokasaurus.library.map.answers import AnswerColumn
from tokasaurus.library.map.rows import MAX_BATCH_ROWS, column_keys, default_keys, hash_key
from tokasaurus.library.map.sources import open_source

ROWS = [{"id": f"r{number}", "question": f"what is {number}?", "level": number % 5} for number in range(5_000)]
TABLE = pa.Table.from_pylist(ROWS)


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet_files(folder: Path) -> object:
    pq.write_table(TABLE[:3_000], folder / "a.parquet", row_group_size=700)
    pq.write_table(TABLE[3_000:], folder / "b.parquet")
    return str(folder / "*.parquet")


def json_lines_file(folder: Path) -> object:
    write_json_lines(folder / "rows.jsonl", ROWS)
    return folder / "rows.jsonl"


def compressed_json_lines(folder: Path) -> object:
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, ROWS)))
    return folder / "rows.jsonl.gz"


def csv_files(folder: Path) -> object:
    pyarrow.csv.write_csv(TABLE[:10], folder / "1.csv")
    pyarrow.csv.write_csv(TABLE[10:], folder / "2.csv")
    return [str(folder / "1.csv"), folder / "2.csv"]


def arrow_file(folder: Path) -> object:
    pyarrow.feather.write_feather(TABLE, str(folder / "rows.feather"))
    return str(folder)


def arrow_stream(folder: Path) -> object:
    with pa.ipc.new_stream(str(folder / "rows.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE)
    return folder / "rows.arrow"


def hugging_face_dataset(_: Path) -> object:
    datasets = pytest.importorskip("datasets", reason="not installed: it is large")
    whole = datasets.Dataset(TABLE)
    return whole.select(range(len(whole)))


SOURCES: dict[str, Callable[[Path], object]] = {
    "parquet": parquet_files,
    "json lines": json_lines_file,
    "json lines, compressed": compressed_json_lines,
    "csv": csv_files,
    "arrow file in a directory": arrow_file,
    "arrow stream": arrow_stream,
    "dataset": hugging_face_dataset,
    "table": lambda _: TABLE,
    "pandas": lambda _: TABLE.to_pandas(),
    "polars": lambda _: polars.from_arrow(TABLE),
    "list": lambda _: ROWS,
    "generator": lambda _: (dict(row) for row in ROWS),
}


@pytest.mark.parametrize("name", SOURCES)
def test_all_rows_come_in_order_in_small_batches(name: str, tmp_path: Path) -> None:
    source = open_source(SOURCES[name](tmp_path), key="id")
    assert source.columns == ["id", "question", "level"]
    rows: list[dict[str, Any]] = []
    for batch in source.batches():
        assert batch.first_number == len(rows)
        assert 1 <= batch.num_rows <= MAX_BATCH_ROWS
        assert batch.column("level") == [row["level"] for row in batch.rows(["level"])]
        rows += batch.rows()
    assert rows == ROWS
    assert source.num_rows in (None, len(ROWS))
    if name in ("parquet", "json lines", "arrow file in a directory", "dataset", "pandas", "polars", "table", "list"):
        assert source.num_rows == len(ROWS)


ANSWERS = [
    AnswerColumn("answer", [None if number % 7 == 0 else f"a{number}" for number in range(len(ROWS))], False),
    AnswerColumn("answers", [None if number % 7 == 0 else [f"a{number}", "b"] for number in range(len(ROWS))], True),
]
EXPECTED = [{**row, **{column.name: column.values[number] for column in ANSWERS}} for number, row in enumerate(ROWS)]
READ_BACK: dict[str, tuple[type, Callable[[Any], list[dict[str, Any]]]]] = {
    "pandas": (pandas.DataFrame, lambda frame: pa.Table.from_pandas(frame).to_pylist()),
    "polars": (polars.DataFrame, lambda frame: frame.to_dicts()),
    "json lines": (list, list),
    "json lines, compressed": (list, list),
    "list": (list, list),
    "generator": (list, list),
}


@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_joined_to_the_type_that_came_in(name: str, tmp_path: Path) -> None:
    given = SOURCES[name](tmp_path)
    source = open_source(given)
    source.keep_rows = True
    assert sum(batch.num_rows for batch in source.batches()) == len(ROWS)
    joined = source.joined(ANSWERS)
    if name == "dataset":
        kind, to_rows = type(given), lambda dataset: dataset.to_list()
    else:
        kind, to_rows = READ_BACK.get(name, (pa.Table, lambda table: table.to_pylist()))
    assert isinstance(joined, kind)
    assert to_rows(joined) == EXPECTED


def test_a_pandas_frame_may_have_numbers_as_names_and_halves_of_surrogate_pairs() -> None:
    texts, lists = ["x", "a\ud800", None, "ж"], [["b"], [], ["c", "d"], ["\udfff"]]
    frame = pandas.DataFrame({0: [1, 2, 3, 4], 1: pandas.Series(texts, dtype=object), 2: lists})
    source = open_source(frame, key="0")
    (batch,) = source.batches()
    assert [list(row.values()) for row in batch.rows()] == [
        [1, "x", ["b"]],
        [2, "a\ufffd", []],
        [3, None, ["c", "d"]],
        [4, "ж", ["\ufffd"]],
    ]
    why = "has half of a surrogate pair, which no UTF-8 text has"
    assert batch.errors == {
        1: f"row 1 of the DataFrame: its column '1' {why}",
        3: f"row 3 of the DataFrame: its column '2' {why}",
    }
    joined: Any = source.joined([AnswerColumn("answer", ["y"] * 4, False)])
    assert list(joined.columns) == [0, 1, 2, "answer"]
    assert (list(frame[1]), list(frame[2])) == (texts, lists), "the user's frame is as it was"


def test_seeds_in_a_pandas_frame_are_exact_beside_a_row_without_one() -> None:
    source = open_source(pandas.DataFrame({"q": ["a", "b"]}))
    assert sum(batch.num_rows for batch in source.batches()) == 2
    joined: Any = source.joined([AnswerColumn("seed", [2**64 - 1, None], False, "seed")])
    assert (joined["seed"][0], joined["seed"].isna().tolist()) == (2**64 - 1, [False, True])


def test_answers_of_a_dataset_are_typed_even_if_all_are_null() -> None:
    datasets = pytest.importorskip("datasets", reason="not installed: it is large")
    dataset = datasets.Dataset.from_dict({"q": ["a", "b"]})
    source = open_source(dataset.select([1]))
    assert sum(batch.num_rows for batch in source.batches()) == 1
    joined: Any = source.joined([AnswerColumn("answer", [None], True), AnswerColumn("seed", [None], True, "seed")])
    assert joined.to_list() == [{"q": "b", "answer": None, "seed": None}]
    assert joined.features.arrow_schema.types == [pa.string(), pa.list_(pa.string()), pa.uint64()]
    with pytest.raises(TypeError, match="rows: a DatasetDict; take one of its splits, 'train'"):
        open_source(datasets.DatasetDict({"train": dataset}))


def test_a_named_index_of_a_frame_is_a_column_and_stays_the_index() -> None:
    frame = pandas.DataFrame({"question": ["x", "y"]}, index=pandas.Index(["k1", "k2"], name="id"))
    source = open_source(frame, key="id")
    assert [row for batch in source.batches() for row in batch.rows()] == [
        {"id": "k1", "question": "x"},
        {"id": "k2", "question": "y"},
    ]
    joined: Any = source.joined([AnswerColumn("answer", ["1", "2"], False)])
    assert list(joined.index) == ["k1", "k2"]
    assert list(joined.columns) == ["question", "answer"]
    assert list(frame.columns) == ["question"], "the user's frame is as it was"


def test_types_of_columns_are_kept(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "list": pa.array([[1], None], pa.list_(pa.int8())),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "dense": pa.array([b"x", b"y"], pa.binary(1)),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    source = open_source(tmp_path / "t.parquet")
    assert source.schema is not None
    assert source.schema.equals(pq.read_schema(tmp_path / "t.parquet"))


def test_an_iterable_is_read_as_far_as_its_batches_are() -> None:
    taken = 0

    def rows() -> Iterator[dict[str, int]]:
        nonlocal taken
        for taken in range(1, 1_000_000):
            yield {"x": taken}

    batches = open_source(rows()).batches()
    for _ in range(3):
        next(batches)
    assert taken <= 3 * MAX_BATCH_ROWS


def test_long_rows_come_in_smaller_batches() -> None:
    source = open_source({"text": "x" * 100_000} for _ in range(1_000))
    sizes = [batch.num_rows for batch in source.batches()]
    assert sum(sizes) == 1_000
    assert max(sizes[1:]) <= 84


def expect_error(kind: type[Exception], match: str, rows: object, key: str | None = None) -> None:
    with pytest.raises(kind, match=match) as caught:
        for _ in open_source(rows, key).batches():
            pass
    assert "\n" not in str(caught.value)


def test_errors_say_what_is_wrong_and_what_there_is(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ROWS[:3])
    pq.write_table(TABLE[:3], tmp_path / "a.parquet")
    pq.write_table(TABLE[:3].drop_columns("level"), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no Parquet at all")
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "e.json").write_text('[{"a": 1}]')
    (tmp_path / "f.jsonl").write_text("17\n")
    (tmp_path / "g.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "h.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    expect_error(FileNotFoundError, r"\*\.csvx: no such file", str(tmp_path / "*.csvx"))
    expect_error(FileNotFoundError, r"there is no directory .*/nowhere", tmp_path / "nowhere" / "a.parquet")
    expect_error(FileNotFoundError, "has no file that can be read", tmp_path / "empty")
    expect_error(ValueError, r"of one kind.*JSON lines.*and.*Parquet", str(tmp_path / "a.*"))
    expect_error(
        ValueError, r"a\.parquet has level \(int64\), .*b\.parquet has no level", str(tmp_path / "[ab].parquet")
    )
    expect_error(ValueError, r"c\.parquet: cannot be read", tmp_path / "c.parquet")
    (batch,) = open_source(tmp_path / "d.jsonl").batches()
    assert "d.jsonl: line 2 is not JSON" in batch.errors.pop(1)
    assert (batch.errors, batch.dicts, batch.lines) == ({}, [{"a": 1}, {}], [b'{"a": 1}', b"{}"])
    expect_error(ValueError, "line 1 is not a JSON object.*a JSON array of rows is not JSON lines", tmp_path / "e.json")
    expect_error(ValueError, "line 1 is not a JSON object", tmp_path / "f.jsonl")
    (batch,) = [batch for batch in open_source(tmp_path / "g.csv").batches() if batch.errors]
    assert batch.errors == {0: f"row 1 of {tmp_path / 'g.csv'}: it has 1 value, and the file has 2 columns"}
    expect_error(ValueError, r"h\.txt: not a known kind of file; .*\.parquet, .*\.jsonl", tmp_path / "h.txt")
    expect_error(ValueError, r"key='uid': .* has no such column; its columns are id, question, level", ROWS, "uid")
    expect_error(TypeError, "row 0 of the rows is not a dict, but int", [2, 3])
    (batch,) = open_source([{"a": 1}, 2]).batches()
    assert (batch.errors, batch.dicts) == ({1: "row 1 of the rows is not a dict, but int"}, [{"a": 1}, {}])
    expect_error(TypeError, "rows: int", 17)
    expect_error(TypeError, "rows: a dict", {"a": 1})
    expect_error(TypeError, "LazyFrame", polars.from_arrow(TABLE).lazy())
    expect_error(ValueError, "is named twice", [tmp_path / "a.jsonl", tmp_path / "a.jsonl"])
    expect_error(ValueError, "two columns 'a'", pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))


BAD_LINES = {
    b"no JSON": "is not JSON",
    b'{"a": ': "is not JSON",
    b'{"a": NaN}': "is not JSON",
    b'{"a": "\xff"}': "is not JSON",
    b"\0\0\0": "is not JSON",
    b"17": "is not a JSON object",
    b'[{"a": 1}]': "is not a JSON object",
    b"null": "is not a JSON object",
}


@pytest.mark.parametrize("seed", range(8))
def test_a_bad_line_is_an_error_of_its_row_wherever_it_is(seed: int, tmp_path: Path) -> None:
    """The first one of the file and of the job, too."""
    random = np.random.default_rng(seed)
    wanted: list[tuple[dict[str, Any], str | None]] = []
    for name in ("a.jsonl", "b.jsonl"):
        lines: list[bytes] = []
        num_rows = int(random.integers(2, 700))
        for index in range(num_rows):
            lines += [b"", b" \t"][: int(random.integers(0, 3))]
            is_bad = random.random() < 0.3 or index == 0
            if is_bad and index != num_rows - 1:
                bad = list(BAD_LINES)[int(random.integers(len(BAD_LINES)))]
                lines.append(bad)
                wanted.append(({}, f"{tmp_path / name}: line {len(lines)} {BAD_LINES[bad]}"))
            else:
                wanted.append(({"a": len(wanted)}, None))
                lines.append(b'{"a": %d}' % wanted[-1][0]["a"])
        start = codecs.BOM_UTF8 if seed % 2 else b""
        (tmp_path / name).write_bytes(start + [b"\n", b"\r\n"][seed // 2 % 2].join(lines))
    source = open_source(str(tmp_path / "*.jsonl"))
    assert source.columns == ["a"]
    read: list[tuple[dict[str, Any], str | None]] = []
    for batch in source.batches():
        read += [(row, batch.errors.get(index)) for index, row in enumerate(batch.rows())]
    assert [row for row, _ in read] == [row for row, _ in wanted]
    for (_, error), (_, start_of_error) in zip(read, wanted, strict=True):
        assert (error is None) == (start_of_error is None)
        assert error is None or error.startswith(start_of_error or "")


def test_what_is_no_dict_is_an_error_of_its_row_wherever_it_is() -> None:
    rows = [None, "x", {"a": 1}, 7, {"a": 2}]
    (batch,) = open_source(iter(rows)).batches()
    assert (list(batch.errors), batch.column("a")) == ([0, 1, 3], [None, None, 1, None, 2])


@pytest.mark.parametrize("num_rows", [5, 100_000])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_csv_row_with_too_many_or_too_few_values_is_an_error_of_its_row(
    is_first: bool, num_rows: int, tmp_path: Path
) -> None:
    """In several blocks, among rows of several lines and beside values of another type."""
    random = np.random.default_rng(num_rows)
    rows = [[str(number), f"line\n{number}", "1.5"] for number in range(num_rows)]
    for number in {*[0][:is_first], *random.integers(1, num_rows, num_rows // 20 + 1).tolist()}:
        rows[number] = rows[number][: int(random.integers(1, 3))] if random.random() < 0.5 else [*rows[number], "", "x"]
    if num_rows > 90_000:
        rows[90_000] = ["90000", "x", "no number"]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text", "share"], *rows])
    source = open_source(path)
    for _ in range(2):  # as a joined table reads them again
        read: list[tuple[object, ...]] = []
        errors: dict[int, str] = {}
        for batch in source.batches():
            assert batch.first_number == len(read)
            errors |= {len(read) + index: error for index, error in batch.errors.items()}
            read += zip(*(batch.column(name) for name in ("id", "text", "share")), strict=True)
        for number, row in enumerate(rows):
            if len(row) != 3:
                assert read[number] == (None, None, None)
                has = "1 value" if len(row) == 1 else f"{len(row)} values"
                assert errors.pop(number) == f"row {number} of {path}: it has {has}, and the file has 3 columns"
            elif row[2] == "1.5":
                assert read[number] == (number, row[1], 1.5)
        assert list(errors) == ([90_000] if num_rows > 90_000 else [])


@pytest.mark.parametrize("num_before", [3, 100_000])
def test_a_csv_row_that_is_not_utf_8_is_an_error_and_the_others_are_texts(num_before: int, tmp_path: Path) -> None:
    """Within the megabyte that decides on the types, and after it."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"id,question\n" + b"7,what is it\n" * num_before + "8,\xff\n9,né\n".encode("latin-1") + b"10,\n")
    (tmp_path / "more.csv").write_bytes(b"id,question\n11,\xfe\n")
    source = open_source([path, tmp_path / "more.csv"])
    assert [str(field.type) for field in source.schema or ()] == ["int64", "string"]
    for _ in range(2):  # as a joined table reads them again
        texts: list[str | None] = []
        errors: dict[int, str] = {}
        for batch in source.batches():
            errors |= {len(texts) + index: error for index, error in batch.errors.items()}
            texts += batch.column("question")
        assert texts == ["what is it"] * num_before + ["\ufffd", "n\ufffd", None, "\ufffd"]
        assert list(errors) == [num_before, num_before + 1, num_before + 3]
    assert errors[num_before].startswith(f"row {num_before} of {path}: its column 'question' is not UTF-8: ")
    assert "row 0 of" in errors[num_before + 3]


def test_a_csv_value_of_another_type_than_those_before_is_an_error_and_the_others_have_theirs(tmp_path: Path) -> None:
    """After the megabyte that decides on the types, and in a second file."""
    rows = [(str(number), f'say "{number}"\n', "" if number % 7 else "1.5", "2026-11-26") for number in range(60_000)]
    bad = {50_000: (0, "many"), 50_001: (3, "today"), 59_999: (2, '"two"\n')}
    for number, (index, value) in bad.items():
        rows[number] = (*rows[number][:index], value, *rows[number][index + 1 :])
    for name, part in {"a.csv": rows, "b.csv": rows[50_000:50_010]}.items():
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([("id", "text", "share", "day"), *part])
    source = open_source([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert [str(field.type) for field in source.schema or ()] == ["int64", "string", "double", "date32[day]"]
    for _ in range(2):
        read: list[tuple[object, ...]] = []
        errors: dict[int, str] = {}
        for batch in source.batches():
            errors |= {len(read) + index: error for index, error in batch.errors.items()}
            read += zip(*(batch.column(name) for name in ("id", "text", "share", "day")), strict=True)
        day = datetime.date(2026, 11, 26)
        wanted = [(number, f'say "{number}"\n', None if number % 7 else 1.5, day) for number in range(60_000)]
        for number, (index, _) in bad.items():
            wanted[number] = (*wanted[number][:index], None, *wanted[number][index + 1 :])  # type: ignore[assignment]
        assert read == wanted + wanted[50_000:50_010]
        assert list(errors) == [*bad, 60_000, 60_001]
    assert errors[50_000] == f"row 50000 of {tmp_path / 'a.csv'}: its column 'id' is not of the type int64: 'many'"
    assert errors[60_001].startswith(f"row 1 of {tmp_path / 'b.csv'}: its column 'day' is not of the type date32")


def test_an_unreadable_gzip_file_stops_with_its_line(tmp_path: Path) -> None:
    content = gzip.compress(b'{"a": 1}\n' * 100_000)
    (tmp_path / "cut.jsonl.gz").write_bytes(content[: len(content) // 2])
    expect_error(ValueError, r"cut\.jsonl\.gz: cannot be read after line \d+", tmp_path / "cut.jsonl.gz")


def test_keys_are_distinct_and_stay_when_files_are_moved(tmp_path: Path) -> None:
    def hashes(folder: Path) -> list[int]:
        source = open_source(str(folder / "*.parquet"))
        return [key for batch in source.batches() for key in default_keys(source, batch).tolist()]

    (tmp_path / "one").mkdir()
    parquet_files(tmp_path / "one")
    before = hashes(tmp_path / "one")
    assert len(set(before)) == len(ROWS)
    (tmp_path / "one").rename(tmp_path / "two")
    assert hashes(tmp_path / "two") == before
    (tmp_path / "two" / "a.parquet").rename(tmp_path / "two" / "c.parquet")
    assert set(hashes(tmp_path / "two")) & set(before) == set(before[3_000:])


def test_key_columns_tell_types_and_refuse_null() -> None:
    (batch,) = open_source([{"id": key} for key in ("1", 1, b"1", 1.5, "\ud800", (1, 2))]).batches()
    hashes, wrong = column_keys(batch, "id")
    assert (len(set(hashes.tolist())), wrong) == (6, {})
    assert hash_key(np.int64(7)) == hash_key(7)
    assert hash_key(np.str_("a")) == hash_key("a")
    (batch,) = open_source([{"id": "a"}, {"id": None}]).batches()
    assert column_keys(batch, "id")[1] == {1: "row 1 of the rows has no key: its column 'id' is null"}
    (batch,) = open_source([{"id": "a"}, {"id": ""}, {"id": ""}]).batches()
    error = "row {} of the rows has no key: its column 'id' is empty"
    assert column_keys(batch, "id")[1] == {index: error.format(index) for index in (1, 2)}


@pytest.mark.parametrize(
    "null", [pandas.NA, pandas.NaT, math.nan, np.float32("nan"), decimal.Decimal("sNaN")], ids=repr
)
def test_whatever_says_that_there_is_no_value_is_no_key(null: object) -> None:
    (batch,) = open_source([{"id": np.longdouble(1)}, {"id": null}]).batches()
    assert column_keys(batch, "id")[1] == {1: "row 1 of the rows has no key: its column 'id' is null"}


def test_half_a_surrogate_pair_in_json_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"a": "x\\ud800y"}\n{"a": "b"}\n')
    (batch,) = open_source(tmp_path / "s.jsonl").batches()
    assert batch.rows() == [{"a": "x\ud800y"}, {"a": "b"}]
    assert batch.lines == ['{"a":"x\ufffdy"}'.encode(), b'{"a": "b"}']


def test_json_lines_and_dicts_need_no_pyarrow(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ROWS[:3])
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tokasaurus.library.map.sources import open_source\n"
        f"assert sum(batch.num_rows for batch in open_source({str(tmp_path / 'a.jsonl')!r}).batches()) == 3\n"
        "assert sum(batch.num_rows for batch in open_source([{'a': 1}]).batches()) == 1\n"
        f"open_source({str(tmp_path / 'x.parquet')!r})\n"
    )
    (tmp_path / "x.parquet").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"ImportError: {tmp_path / 'x.parquet'} needs pyarrow: pip install pyarrow"


@pytest.fixture
def no_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)


@pytest.mark.usefixtures("no_arrow")
def test_csv_without_pyarrow_has_texts(tmp_path: Path) -> None:
    """Against the csv module's writer, in blocks of several batches, with texts of several lines and compressed."""
    rows = [(f"{number:03}", f'say "{number}",\nné', "" if number % 7 else "1.5") for number in range(3_000)]
    for name, part in {"a.csv": rows[:2_000], "b.csv": rows[2_000:]}.items():
        text = io.StringIO()
        csv.writer(text).writerows([("id", "text", "share"), *part])
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + text.getvalue().encode())
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "b.csv").read_bytes()))
    source = open_source([tmp_path / "a.csv", tmp_path / "b.csv.gz"], key="id")
    assert (source.columns, source.schema, source.num_rows) == (["id", "text", "share"], None, None)
    source.keep_rows = True
    read = [tuple(row.values()) for batch in source.batches() for row in batch.rows()]
    assert read == [(number, text, share or None) for number, text, share in rows]
    assert source.joined([])[2] == {"id": "002", "text": 'say "2",\nné', "share": None}  # type: ignore[index]


@pytest.mark.usefixtures("no_arrow")
def test_bad_rows_of_csv_without_pyarrow_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"id,q\n1,a\n2\n\n3,b,c\n4,\xff\n5,d\n")
    (batch,) = open_source(path).batches()
    assert batch.column("q") == ["a", None, None, "\ufffd", "d"]
    assert [batch.errors[index].partition(": ")[2][:40] for index in (1, 2, 3)] == [
        "it has 1 value, and the file has 2 colum",
        "it has 3 values, and the file has 2 colu",
        "its column 'q' is not UTF-8: 'utf-8' cod",
    ]
    assert batch.errors[1].startswith(f"row 1 of {path}: ")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    expect_error(ValueError, r"has two columns 'a'", tmp_path / "twice.csv")
    (tmp_path / "other.csv").write_text("id\n1\n")
    expect_error(ValueError, r"must have equal columns", [path, tmp_path / "other.csv"])
    with pytest.raises(ValueError, match="no such column; its columns are id, q"):
        open_source(path, key="zzz")
    path.write_text("id,q\n")
    assert list(open_source(path).batches()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "generator"])
def test_a_million_rows_take_little_memory(kind: str, tmp_path: Path) -> None:
    script = f"""
import resource, sys
import pyarrow.parquet
from tokasaurus.library.map.sources import open_source
rows = ({{"id": n, "question": "what is %d?" % n}} for n in range(1_000_000))
rows = rows if {kind!r} == "generator" else {str(tmp_path / f"rows.{kind}")!r}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(batch.num_rows for batch in open_source(rows).batches()) == 1_000_000
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
"""
    ids = list(range(1_000_000))
    table = pa.table({"id": ids, "question": [f"what is {number}?" for number in ids]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
    elif kind == "jsonl":
        write_json_lines(tmp_path / "rows.jsonl", table.to_pylist())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
