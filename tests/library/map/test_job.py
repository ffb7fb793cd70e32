"""A call of `map` against a dict of expected rows: every row once, with its own answer or an error."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset
from pydantic import BaseModel

from tests.library.map.helpers.calls import call_map, expected_rows, without_messages
from tests.library.map.helpers.finished import read_output
from tests.library.map.helpers.instant_session import InstantSession, completion, respond
from tokasaurus import files
from tokasaurus.library.connection import ServerError
from tokasaurus.library.map import journal as journal_module
from tokasaurus.library.map.journal import JobChanged, Journal, OutputFull
from tokasaurus.library.map.outputs import MapSummary, StoredOutput
from tokasaurus.library.model_files import find_model_files
from tokasaurus.library.requests import Answer
from tokasaurus.library.sampling import Sampling


def make_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"k{number}", "q": f"too long {number}" if number % 50 == 7 else f"question {number % 311}"}
        for number in range(count)
    ]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def shards_of_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokasaurus.library.map.shards.MAX_SHARD_ROWS", 1_000)


@pytest.mark.usefixtures("shards_of_1000")
@pytest.mark.parametrize("given", ["list", "generator", "table", "parquet", "jsonl"])
@pytest.mark.parametrize("key", [None, "id"])
def test_every_row_has_its_own_answer(given: str, key: str | None, output: Path, tmp_path: Path) -> None:
    rows = make_rows(3_000)
    source: Any = rows
    if given == "generator":
        source = (row for row in rows)
    elif given == "table":
        source = pa.Table.from_pylist(rows)
    elif given == "parquet":
        source = str(tmp_path / "*.parquet")
        pq.write_table(pa.Table.from_pylist(rows[:900]), tmp_path / "1.parquet")
        pq.write_table(pa.Table.from_pylist(rows[900:]), tmp_path / "2.parquet")
    elif given == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = InstantSession(max_lines=700, num_kept=300)
    summary = call_map(source, output, session, prompt="{q}", key=key)
    assert isinstance(summary, MapSummary)
    assert (summary.num_rows, summary.num_skipped, summary.num_errors) == (3_000, 0, 60)
    assert (summary.prompt_tokens, summary.output_tokens) == (3 * 2_940, 2 * 2_940)
    assert summary.output == output
    (reason,) = summary.reasons
    assert re.fullmatch(r"failed: 60 x length: 'too long \d+' is too long", reason)
    written = read_output(output)
    number_of = {row["id"]: number for number, row in enumerate(rows)}
    written.sort(key=lambda row: number_of[row["id"]])
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])
    assert written[7]["error"] == "'too long 7' is too long"
    suffix = "jsonl" if given == "jsonl" else "parquet"
    assert sorted(path.name for path in output.iterdir()) == [f"part-00000{number}.{suffix}" for number in range(3)]
    assert len(session.sent) == 3_000


@pytest.mark.parametrize("kind", ["list", "generator", "table", "pandas", "polars", "dataset", "parquet", "jsonl"])
def test_without_an_output_the_type_that_came_in_comes_back(kind: str, tmp_path: Path) -> None:
    rows = make_rows(3_000)
    table = pa.Table.from_pylist(rows)
    source: Any
    if kind == "dataset":
        source = pytest.importorskip("datasets", reason="not installed: it is large").Dataset(table)
    elif kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
        source = tmp_path / "rows.parquet"
    elif kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        source = {
            "list": rows,
            "generator": (row for row in rows),
            "table": table,
            "pandas": table.to_pandas(),
            "polars": polars.from_arrow(table),
        }[kind]
    joined = call_map(source, session=InstantSession(num_kept=300), prompt="q")
    if kind in ("list", "generator", "jsonl"):
        assert isinstance(joined, list)
        read = joined
    elif kind == "pandas":
        assert isinstance(joined, pandas.DataFrame)
        read = pa.Table.from_pandas(joined).to_pylist()
    elif kind == "polars":
        assert isinstance(joined, polars.DataFrame)
        read = joined.to_dicts()
    else:
        assert type(joined) is (type(source) if kind == "dataset" else pa.Table)
        read = list(joined) if kind == "dataset" else joined.to_pylist()
    assert without_messages(read) == expected_rows(rows, [row["q"] for row in rows])
    assert rows == make_rows(3_000), "the user's rows are as they were"


@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_several_samples_are_a_list_in_each_row(format_name: str, output: Path) -> None:
    rows = [{"q": "x"}, {"q": "too long"}]
    call_map(rows, output, sampling=Sampling(n=3), prompt="q", format=format_name, prefix="m_")
    answer = ["x → 1 #0", "x → 1 #1", "x → 1 #2"]
    assert read_output(output) == [
        {"q": "x", "m_answer": answer, "m_finish_reason": ["stop"] * 3, "m_error": None},
        {"q": "too long", "m_answer": None, "m_finish_reason": None, "m_error": "'too long' is too long"},
    ]


def test_a_schema_goes_with_every_request_and_answers_are_json_text(output: Path) -> None:
    class Thing(BaseModel):
        x: int

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["x"]
        return 200, completion(body, '{"x": 7}')

    call_map([{"q": "x"}], output, InstantSession(respond=answer), schema=Thing, prompt="q")
    assert read_output(output) == [{"q": "x", "answer": '{"x": 7}', "finish_reason": "stop", "error": None}]


def test_rows_that_cannot_be_sent_have_an_error_and_the_others_an_answer(output: Path) -> None:
    values: list[Any] = ["fine", None, 17, "half \ud800", [1, 2], {"a": 1}, "too long", "also fine", b"bytes", [1, "a"]]
    rows = [{"number": number} for number in range(len(values))]
    call_map(rows, output, prompt=lambda row: values[row["number"]] if row["number"] != 5 else 1 / 0)
    written = read_output(output)
    assert [row["number"] for row in written if row["error"] is None] == [0, 4, 7]
    errors = {row["number"]: row["error"] for row in written if row["error"] is not None}
    assert all(errors.values())
    assert errors[1] == "there is no prompt: it is None"
    assert errors[5] == "the function of prompt= failed: ZeroDivisionError: division by zero"
    assert errors[6] == "'too long' is too long"
    assert "surrogate" in errors[3]


def test_chats_and_completions_go_to_their_routes() -> None:
    def urls(**arguments: Any) -> tuple[set[str], list[dict[str, Any]]]:
        session = InstantSession()
        joined = call_map([{"q": "x", "m": [{"role": "user", "content": "y"}]}], session=session, **arguments)
        return {line.url for line in session.sent}, joined

    assert urls(prompt="{q}")[0] == {"/v1/completions"}
    assert urls(prompt="{q}", chat=True)[0] == {"/v1/chat/completions"}
    sent, joined = urls(messages="m")
    assert sent == {"/v1/chat/completions"}
    assert joined[0]["answer"] == "y → 1"


@pytest.mark.parametrize("form", ["JSON lines", "dicts"])
def test_integers_beyond_64_bits_are_exact_in_prompts_and_outputs(form: str, output: Path, tmp_path: Path) -> None:
    rows = [{"n": 10**30 + number, "more": {"m": [-(2**63) - 1, 1.5, number]}} for number in range(3)]
    source: Any = rows
    if form == "JSON lines":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call_map(source, output, prompt="{n} {more}", format="jsonl")
    for written, row in zip(sorted(read_output(output), key=itemgetter("n")), rows, strict=True):
        prompt = f"{row['n']} {json.dumps(row['more'], separators=(',', ':'))}"
        assert written == {**row, "answer": f"{prompt} → {len(prompt)}", "finish_reason": "stop", "error": None}
    session = InstantSession()
    asked = {"role": "user", "content": "x", "n": 10**30}
    joined = call_map(source, session=session, prompt=lambda row: [{**asked, "more": row["more"]}])
    assert [{name: row[name] for name in ("n", "more")} for row in joined] == rows
    sent = [json.loads(line.body)["messages"] for line in session.sent]
    assert sorted(sent, key=str) == [[{**asked, "more": row["more"]}] for row in rows]


def test_rows_with_a_common_prefix_are_sent_together() -> None:
    rows = [{"q": f"{number % 7} and {number}"} for number in range(900)]
    session = InstantSession()
    call_map(rows, session=session, prompt="q")
    prefixes = [json.loads(line.body)["prompt"][0] for line in session.sent[:512]]
    assert prefixes == sorted(prefixes)


def test_the_same_call_again_computes_nothing(output: Path) -> None:
    rows = make_rows(3_000)
    call_map(rows, output, prompt="{q}")
    files = {path: path.read_bytes() for path in output.iterdir()}
    session = InstantSession()
    summary = call_map(iter(rows), output, session, prompt=lambda row: row["q"])
    assert (summary.num_rows, summary.num_skipped, summary.output_tokens) == (3_000, 3_000, 0)
    assert session.sent == []
    assert {path: path.read_bytes() for path in output.iterdir()} == files


def test_the_rows_to_come_are_announced_where_their_number_is_known(output: Path) -> None:
    rows = make_rows(600)
    first, second, unknown = InstantSession(), InstantSession(), InstantSession()
    call_map(rows[:200], output, first, prompt="{q}", key="id")
    call_map(rows, output, second, prompt="{q}", key="id")
    call_map(iter(rows), session=unknown, prompt="{q}")
    assert (first.announced, second.announced, unknown.announced) == (200, 400, None)


def test_more_rows_are_added_to_those_that_are_done(output: Path) -> None:
    rows = make_rows(600)
    call_map(rows[:200] + rows[300:400], output, prompt="{q}", key="id")
    session = InstantSession()
    summary = call_map(rows, output, session, prompt="{q}", key="id")
    assert summary.num_skipped == 300
    assert len(session.sent) == 300
    assert sorted(row["id"] for row in read_output(output)) == sorted(row["id"] for row in rows)


class Interrupted(Exception): ...


def rows_until(rows: list[dict[str, Any]], end: int) -> Iterator[dict[str, Any]]:
    yield from rows[:end]
    raise Interrupted


def test_after_an_error_what_has_finished_is_stored_and_only_the_rest_is_computed(output: Path) -> None:
    rows = make_rows(9_000)
    first = InstantSession(num_kept=100)
    with pytest.raises(Interrupted):
        call_map(rows_until(rows, 5_000), output, first, prompt="{q}", key="id")
    done = {row["id"] for row in read_output(output)}
    assert 4_000 < len(done) < 5_000
    second = InstantSession()
    call_map(rows, output, second, prompt="{q}", key="id")
    assert len(second.sent) == 9_000 - len(done)
    written = sorted(read_output(output), key=lambda row: int(row["id"][1:]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])


def test_a_lost_server_ends_the_call_and_the_same_call_goes_on(output: Path) -> None:
    class Lost(InstantSession):
        def exchange(self, *arguments: Any, **keywords: Any) -> list[Answer]:
            if len(self.sent) > 1_000:
                raise ServerError("the server is gone")
            return super().exchange(*arguments, **keywords)

    rows = make_rows(4_000)
    with pytest.raises(ServerError, match="the server is gone; what has finished is stored, and the same call goes on"):
        call_map(rows, output, Lost(), prompt="{q}", key="id")
    assert len(read_output(output)) > 500
    call_map(rows, output, prompt="{q}", key="id")
    assert len(read_output(output)) == 4_000
    joined = call_map(rows, session=Lost(), prompt="{q}", key="id")
    assert {row["error"] for row in joined[3_000:]} == {"the server is gone"}
    assert joined[0]["answer"] == "question 0 → 10"


def test_rows_without_a_key_of_their_own_are_errors(output: Path) -> None:
    rows: list[Any] = make_rows(3_000)
    rows[2_500]["id"] = "k17"
    rows[2_600] = {"q": "x", "id": None}
    rows[2_700] = 17
    rows[2_800] = {**rows[2_800], "id": object()}
    expected = {
        2_500: "row 2500 of the rows: its key 'k17' is that of an earlier row",
        2_600: "row 2600 of the rows has no key: its column 'id' is null",
        2_700: "row 2700 of the rows is not a dict, but int",
        2_800: "row 2800 of the rows: its key is object; allowed are texts and numbers",
    }
    joined = call_map(iter(rows), prompt="{q}", key="id")
    assert {index: row["error"] for index, row in enumerate(joined) if index in expected} == expected
    assert sum(row["error"] is not None for row in joined) == 60 + 4
    summary = call_map(iter(rows), output, prompt="{q}", key="id")
    assert (summary.num_rows, summary.num_errors) == (3_000, 64)
    written = read_output(output)
    assert len(written) == 3_000
    assert sorted(row["error"] for row in written if row["error"] in expected.values()) == sorted(expected.values())
    session = InstantSession()
    assert call_map(iter(rows), output, session, prompt="{q}", key="id").num_skipped == 3_000
    assert session.sent == []


def test_changed_requests_are_refused_with_the_row_and_the_ways_on(output: Path) -> None:
    rows = make_rows(100)
    call_map(rows, output, prompt="{q}")
    for changed, arguments, match in (
        (rows, {"prompt": "Q: {q}"}, r"row 0 of the rows .*\(prompt was '\{q\}' and is 'Q: \{q\}'\)"),
        (rows, {"prompt": "q", "sampling": Sampling(temperature=0.5)}, "temperature was null and is 0.5"),
        (rows, {"prompt": "q", "sampling": Sampling(n=2)}, "n was null and is 2"),
        (rows, {"prompt": "q", "key": "id"}, "key was null and is 'id'"),
        (rows, {"prompt": "q", "format": "jsonl"}, "part-000000.parquet"),
        ([*rows[:50], {"id": "k50", "q": "edited"}, *rows[51:]], {"prompt": "{q}"}, "row 50 of the rows has an answer"),
    ):
        session = InstantSession()
        with pytest.raises(JobChanged, match=match) as caught:
            call_map(changed, output, session, **arguments)
        assert "overwrite=True" in str(caught.value)
        assert session.sent == []
        assert len(read_output(output)) == 100
    call_map(rows, output, prompt="Q: {q}", overwrite=True)
    assert read_output(output)[0]["answer"] == "Q: question 0 → 13"
    assert len(read_output(output)) == 100


def test_a_prompt_that_is_mended_is_computed_with_retry_errors(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"q": "x"}, {"q": "y"}]
    call_map(rows, output, prompt=lambda row: None if row["q"] == "x" else "y")
    call_map(rows, output, prompt=lambda row: 17 if row["q"] == "x" else "y")
    kept = read_output(output)
    assert call_map(rows, output, prompt=lambda row: row["q"], progress=True).num_skipped == 2
    assert read_output(output) == kept
    assert "1 rows that had no prompt have one now" in capsys.readouterr().err
    with pytest.raises(JobChanged, match="row 1 of the rows"):
        call_map(rows, output, prompt=lambda row: "x" if row["q"] == "x" else None)
    session = InstantSession()
    call_map(rows, output, session, prompt=lambda row: row["q"], retry_errors=True)
    assert len(session.sent) == 1
    assert sorted(row["answer"] for row in read_output(output)) == ["x → 1", "y → 1"]


@pytest.mark.usefixtures("shards_of_1000")
@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_retry_errors_computes_only_the_rows_with_errors(format_name: str, output: Path) -> None:
    rows = make_rows(3_500)
    rows[1_000:2_000] = [{"id": f"k{number}", "q": f"too long {number}"} for number in range(1_000, 2_000)]
    arguments: dict[str, Any] = {"prompt": "{q}", "key": "id", "format": format_name}
    call_map(rows, output, InstantSession(max_lines=500), **arguments)
    before = {row["id"]: row for row in read_output(output)}
    bad = {key for key, row in before.items() if row["error"] is not None}
    assert len(bad) == 1_050

    def half_well(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        number = int(body["prompt"].rpartition(" ")[2])
        return respond(body) if number % 2 else (200, completion(body, "at last"))

    session = InstantSession(respond=half_well)
    summary = call_map(rows, output, session, retry_errors=True, **arguments)
    assert len(session.sent) == 1_050
    after = {row["id"]: row for row in read_output(output)}
    assert len(read_output(output)) == len(after) == 3_500
    assert (summary.num_skipped, summary.num_errors) == (2_450, sum(row["error"] is not None for row in after.values()))
    for key, row in after.items():
        if key not in bad or int(key[1:]) % 2:
            assert row == before[key]
        else:
            assert (row["answer"], row["error"]) == ("at last", None)
    if format_name == "parquet":
        assert dataset.dataset(output).count_rows() == polars.scan_parquet(output).collect().height == 3_500
    # the same call goes on as any other
    assert call_map(rows, output, **arguments).num_skipped == 3_500
    for wrong in ({"overwrite": True, "retry_errors": True}, {"retry_errors": True}):
        with pytest.raises(ValueError, match="retry_errors=True: "):
            call_map(rows, output if "overwrite" in wrong else None, prompt="{q}", **wrong)


@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_a_death_while_errors_are_removed_loses_no_other_row(
    format_name: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step of the replacement of a file, and with it."""
    rows = make_rows(300)
    arguments: dict[str, Any] = {"prompt": "{q}", "key": "id", "format": format_name}

    class Killed(BaseException): ...

    real = journal_module.publish
    for num_steps in range(3):
        call_map(rows, output, overwrite=True, **arguments)
        before = {row["id"]: row for row in read_output(output) if row["error"] is None}
        steps = iter(range(num_steps))

        def publish(temporary: Path, path: Path, steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise Killed
            real(temporary, path)

        with monkeypatch.context() as patched:
            for module in (journal_module, files):
                patched.setattr(module, "publish", publish)
            with pytest.raises(Killed):
                call_map(rows, output, retry_errors=True, **arguments)
        found = read_output(output)
        assert {row["id"]: row for row in found if row["error"] is None} == before
        session = InstantSession()
        call_map(rows, output, session, **arguments)
        assert len(session.sent) == (0 if num_steps < 2 else 6), "once the errors are removed, their rows are not done"
        assert sorted(row["id"] for row in read_output(output)) == sorted(row["id"] for row in rows)


def test_a_row_that_does_not_fit_is_an_error_with_the_way_out(output: Path) -> None:
    rows = [*({"q": f"q{number}"} for number in range(2_000)), {"q": 17}]
    call_map(rows, output, prompt="{q}")
    last = read_output(output)[2_000]
    assert (last["q"], last["answer"]) == (None, None)
    assert re.match(r"row 2000 of the rows: its column 'q' is 17 \(int\).*format='jsonl'", last["error"])
    call_map(rows, output, prompt="{q}", format="jsonl", overwrite=True)
    assert read_output(output)[2_000] == {"q": 17, "answer": "17 → 2", "finish_reason": "stop", "error": None}


def test_wrong_arguments_are_refused_before_anything_is_written(output: Path) -> None:
    rows = [{"q": "x", "error": 1}]
    for arguments, match in (
        ({"prompt": "{q}"}, "column 'error' already"),
        ({"prompt": "{r}", "prefix": "m_"}, "no column 'r'"),
        ({"prompt": "{q}", "prefix": "m_", "format": "csv"}, "format='csv': must be parquet or jsonl"),
        ({"prompt": "{q}", "prefix": "m_", "key": "id"}, "key='id'"),
    ):
        with pytest.raises(ValueError, match=match):
            call_map(rows, output, **arguments)
    with pytest.raises(ValueError, match="only with an output directory"):
        call_map([{"q": "x"}], prompt="q", format="jsonl")
    assert not output.exists()


@pytest.mark.parametrize("source", [[], pa.table({"q": pa.array([], pa.string())})])
def test_no_rows_at_all(source: Any, output: Path) -> None:
    summary = call_map(source, output, prompt="{q}")
    assert summary.num_rows == 0
    assert read_output(output) == []
    (path,) = output.iterdir()
    assert pq.read_schema(path).names[-3:] == ["answer", "finish_reason", "error"]
    assert len(call_map(source, prompt="{q}")) == 0


@pytest.mark.usefixtures("shards_of_1000")
def test_a_full_disk_stops_the_job_and_it_goes_on_later(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(3_000)
    write, left = os.write, 150_000

    def write_while_space_is_left(file: int, content: Any) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(28, "No space left on device")
        written = write(file, bytes(content)[:left])
        left -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_while_space_is_left)
        with pytest.raises(OutputFull, match="No space left on device; the same call goes on when there is space"):
            call_map(rows, output, prompt="{q}", key="id")
    assert len(read_output(output)) == 1_000
    session = InstantSession()
    call_map(rows, output, session, prompt="{q}", key="id")
    assert len(session.sent) < 2_000
    written = sorted(read_output(output), key=lambda row: int(row["id"][1:]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])


@pytest.mark.usefixtures("shards_of_1000")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        rows = [{"id": number, "q": np.random.default_rng(number).bytes(20).hex()} for number in range(5_000)]
        with pytest.raises(OutputFull, match="No space left on device"):
            call_map(rows, disk / "out", prompt="{q}", key="id")
        before = read_output(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        call_map(rows, disk / "out", prompt="{q}", key="id")
        written = sorted(read_output(disk / "out"), key=lambda row: int(row["id"]))
        assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])
        assert len(before) <= len(written)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("shards_of_1000")
def test_files_appear_while_the_job_runs(output: Path) -> None:
    rows = make_rows(3_500)
    seen: list[int] = []

    class Looking(InstantSession):
        def exchange(self, *arguments: Any, **keywords: Any) -> list[Answer]:
            seen.append(len(list(output.iterdir())))
            return super().exchange(*arguments, **keywords)

    call_map(rows, output, Looking(max_lines=500), prompt="{q}")
    assert sorted(set(seen)) == [0, 1, 2, 3]


def test_an_old_shard_is_closed_though_nothing_arrives(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokasaurus.library.map.shards.MAX_SHARD_AGE_S", 0.2)

    class Slow(InstantSession):
        """Half of the rows come at once, the others when a file has appeared."""

        def __init__(self) -> None:
            super().__init__()
            self._held: list[Answer] = []

        def exchange(self, lines: Any, is_last: bool = False, timeout_s: float | None = None) -> list[Answer]:
            answers = super().exchange(lines, is_last, timeout_s)
            if not answers and self._held:
                assert timeout_s is not None
                time.sleep(timeout_s)
                if list(output.iterdir()):
                    answers, self._held = self._held, []
            elif len(answers) > 1:
                self._held = answers[::2]
                answers = answers[1::2]
            return answers

    started_s = time.monotonic()
    call_map(make_rows(100), output, Slow(), prompt="{q}")
    assert time.monotonic() - started_s < 30
    assert len(list(output.iterdir())) == 2
    assert len(read_output(output)) == 100


@pytest.mark.usefixtures("shards_of_1000")
def test_slow_rows_do_not_keep_the_rows_around_them_in_memory(output: Path) -> None:
    """One row of each batch is answered only at the end."""
    table = pa.table({"q": [f"{'slow' if number % 512 == 0 else 'x'} {number}" for number in range(20_000)]})
    table = table.append_column("padding", pa.array(["p" * 1_000] * 20_000))
    before = pa.total_allocated_bytes()
    most = 0

    class Slow(InstantSession):
        def __init__(self) -> None:
            super().__init__(max_lines=1_000)
            self._held: list[Answer] = []

        def exchange(self, lines: Any, is_last: bool = False, timeout_s: float | None = None) -> list[Answer]:
            nonlocal most
            most = max(most, pa.total_allocated_bytes() - before)
            answers = super().exchange(lines, is_last, timeout_s)
            self._held += [answer for answer in answers if b"slow" in answer.line.body]
            answers = [answer for answer in answers if b"slow" not in answer.line.body]
            if is_last and not answers:
                answers, self._held = self._held, []
            return answers

    slices = (row for batch in table.to_batches(5_000) for row in batch.to_pylist())
    call_map(slices, output, Slow(), prompt="{q}")
    assert len(read_output(output)) == 20_000
    assert most < 8 << 20, "of 20 MB in all"


@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_stores_what_has_finished(output: Path, num_signals: int) -> None:
    """The second comes while the prompt function does not return."""
    rows = make_rows(5_000)
    main = threading.main_thread().ident
    assert main is not None

    def prompt(row: dict[str, Any]) -> str:
        if row["id"] == "k3000":
            signal.pthread_kill(main, signal.SIGINT)
            if num_signals == 2:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(60)
        return str(row["q"])

    with pytest.raises(KeyboardInterrupt):
        call_map(rows, output, prompt=prompt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stored = len(read_output(output))
    assert 1_000 < stored < 5_000
    session = InstantSession()
    call_map(rows, output, session, prompt=lambda row: row["q"])
    assert len(session.sent) == 5_000 - stored
    assert len(read_output(output)) == 5_000


@pytest.mark.usefixtures("shards_of_1000")
@pytest.mark.parametrize("given", ["list", "table", "jsonl"])
def test_a_slow_function_of_the_row_delays_neither_the_rows_before_nor_ctrl_c(
    given: str, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is sent alone. The interrupt comes in the middle of a batch, of which a file has some rows already."""
    monkeypatch.setattr("tokasaurus.library.map.job._MAX_ASK_S", 0.0)
    rows = make_rows(3_000)
    source: Any = pa.Table.from_pylist(rows) if given == "table" else rows
    if given == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = InstantSession(max_lines=700, num_kept=30)
    calls = 0

    def prompt(row: dict[str, Any]) -> str:
        nonlocal calls
        calls += 1
        if row["id"] == "k1300":
            os.kill(os.getpid(), signal.SIGINT)
        return str(row["q"])

    with pytest.raises(KeyboardInterrupt):
        call_map(source, output, session, prompt=prompt, key="id")
    assert calls == 1_301
    assert len(session.sent) > 1_250, "a fiftieth of the rows has errors"
    stored = len(read_output(output))
    assert stored > 1_000
    again = InstantSession(max_lines=700, num_kept=300)
    call_map(source, output, again, prompt="{q}", key="id")
    assert len(again.sent) + stored == 3_000
    written = sorted(read_output(output), key=lambda row: int(row["id"][1:]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])


def test_a_handler_of_the_program_that_does_not_raise_does_not_stop_the_job(output: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:

        def prompt(row: dict[str, Any]) -> str:
            if row["id"] in ("k100", "k4000"):
                os.kill(os.getpid(), signal.SIGTERM)
            return str(row["q"])

        call_map(make_rows(5_000), output, prompt=prompt)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM] * 2
    assert len(read_output(output)) == 5_000


def test_progress_tells_rows_and_errors(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(100)
    call_map(rows, output, prompt="{q}", progress=True)
    call_map(rows, output, prompt="{q}", progress=True)
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("100 of 100 rows done, 2 errors, ")
    assert "100 rows are done already" in err
    call_map(rows, output, prompt="{q}")
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_written_does_not_end_the_job(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        assert call_map(make_rows(2_000), output, prompt="{q}", progress=True).num_rows == 2_000
        with pytest.raises(OSError, match="No space left"):
            print("the test is one", file=sys.stderr, flush=True)


def test_answers_that_cannot_be_read_are_errors() -> None:
    joined = call_map(
        [{"q": "a"}, {"q": "b"}, {"q": "c"}],
        session=InstantSession(
            respond=lambda body: {"a": (200, {"odd": 1}), "b": (500, {}), "c": respond(body)}[body["prompt"]]
        ),
        prompt="q",
    )
    assert joined[0]["error"].startswith("the server's answer cannot be read: KeyError")
    assert joined[1]["error"] == "the server answered 500 without a reason"
    assert joined[2]["answer"] == "c → 1"


def test_the_job_needs_no_pyarrow_for_json_lines(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"q": "x"}\n')
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from tests.library.map.helpers.calls import call_map\n"
        f"call_map({str(tmp_path / 'in.jsonl')!r}, Path({str(tmp_path / 'out')!r}), prompt='q')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert read_output(tmp_path / "out")[0]["answer"] == "x → 1"


def test_the_job_needs_no_pyarrow_for_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "in.csv").write_text("id,q\n007,x\n008,\n009,y,z\n")
    summary = call_map(str(tmp_path / "in.csv"), tmp_path / "out", prompt="{id} {q}")
    assert (summary.num_rows, summary.num_errors) == (3, 2)
    rows = read_output(tmp_path / "out")
    assert rows[0]["answer"].startswith("007 x → ")
    assert "'q' is null" in rows[1]["error"]
    assert "it has 3 values" in rows[2]["error"]
    with pytest.raises(ImportError, match="a Parquet output needs pyarrow"):
        call_map(str(tmp_path / "in.csv"), tmp_path / "other", prompt="{q}", format="parquet")
    assert not (tmp_path / "other").exists()


def test_recovered_failed_and_answered_rows_of_one_batch_share_files(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 7 rows are closed in the middle of batches, while all kinds of rows are still to come."""
    monkeypatch.setattr("tokasaurus.library.map.shards.MAX_SHARD_ROWS", 7)
    rows = [{"id": number, "q": None if number % 3 == 0 else f"q{number}"} for number in range(500)]
    session = InstantSession(max_lines=64, num_kept=40)

    class Dies(InstantSession):
        def exchange(self, *arguments: Any, **keywords: Any) -> list[Answer]:
            answers = session.exchange(*arguments, **keywords)
            if len(session.sent) > 200:
                raise OSError("as if it were killed: the journal is not closed")
            return answers

        def room(self) -> int:
            return session.room()

    with monkeypatch.context() as patch:
        patch.setattr(StoredOutput, "stop", lambda self, **_: self._journal.close())
        with pytest.raises(OSError, match="as if it were killed"):
            call_map(rows, output, Dies(), prompt="{q}")
    call_map(rows, output, InstantSession(max_lines=64, num_kept=40), prompt="{q}")
    written = sorted(read_output(output), key=lambda row: int(row["id"]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])
    assert max(pq.read_metadata(path).num_rows for path in output.iterdir()) == 7


def test_files_may_be_added_but_not_renamed_where_rows_have_no_key(output: Path, tmp_path: Path) -> None:
    """A row without a key is known by its file's name and its number."""
    folder = tmp_path / "in"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"q": "a0"}\n{"q": "a1"}\n')
    call_map(str(folder / "*.jsonl"), output, prompt="q")
    (folder / "b.jsonl").write_text('{"q": "b0"}\n')
    assert call_map(folder, output, prompt="q").num_skipped == 2
    (folder / "more" / "c.jsonl").write_text('{"q": "c0"}\n')
    assert call_map(str(folder / "**" / "*.jsonl"), output, prompt="q").num_skipped == 3
    with pytest.raises(JobChanged, match=r"has rows of more/c\.jsonl, which is not in this call's input"):
        call_map(folder, output, prompt="q")
    folder.rename(tmp_path / "moved")
    assert call_map(str(tmp_path / "moved" / "**" / "*.jsonl"), output, prompt="q").num_skipped == 4
    (tmp_path / "moved" / "a.jsonl").rename(tmp_path / "moved" / "z.jsonl")
    with pytest.raises(JobChanged, match=r"has rows of a\.jsonl"):
        call_map(str(tmp_path / "moved" / "**" / "*.jsonl"), output, prompt="q")
    assert sorted(row["q"] for row in read_output(output)) == ["a0", "a1", "b0", "c0"]


def test_with_a_key_rows_may_move_and_those_that_are_gone_are_told(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(100)
    call_map(rows, output, prompt="{q}", key="id")
    call_map(rows[:30:-1], output, prompt="{q}", key="id", progress=True)
    assert "31 rows of the output are not in the input" in capsys.readouterr().err
    assert len(read_output(output)) == 100


def test_an_output_among_the_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a0"}\n')
    output = tmp_path / "out"
    call_map(tmp_path / "a.jsonl", output, prompt="q")
    with pytest.raises(ValueError, match=r"has .*part-000000\.jsonl, which is one of the files to read"):
        call_map(output, output, prompt="q", prefix="second_")


def test_an_output_may_be_a_link_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    call_map(make_rows(3), Path("link"), prompt="{q}")
    assert call_map(make_rows(3), Path("target/../link/"), prompt="{q}").num_skipped == 3
    assert (tmp_path / "target.toka").is_dir()
    monkeypatch.chdir(tmp_path / "target")
    assert call_map(make_rows(3), Path(), prompt="{q}").num_skipped == 3


def test_finished_rows_stay_finished_if_files_are_closed_while_they_are_collected(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds 300 rows in the journal, closes files of 7 of them, and dies in the middle of that."""
    rows = make_rows(500)

    class Dies(InstantSession):
        def exchange(self, *arguments: Any, **keywords: Any) -> list[Answer]:
            if self.sent:
                raise OSError("as if it were killed")
            return super().exchange(*arguments, **keywords)

    def close_only(stored: StoredOutput, **_: bool) -> None:
        stored._journal.close()

    class Killed(BaseException): ...

    num_closed = 0
    close_shard = Journal.close_shard

    def close_some(journal: Journal, *arguments: Any) -> None:
        nonlocal num_closed
        num_closed += 1
        if num_closed > 20:
            raise Killed
        close_shard(journal, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StoredOutput, "stop", close_only)
        with pytest.raises(OSError, match="as if it were killed"):
            call_map(rows, output, Dies(max_lines=300), prompt="{q}")
        assert read_output(output) == []
        patch.setattr("tokasaurus.library.map.shards.MAX_SHARD_ROWS", 7)
        patch.setattr(Journal, "close_shard", close_some)
        with pytest.raises(Killed):
            call_map(rows, output, prompt="{q}")
    assert len(read_output(output)) == 140
    session = InstantSession()
    call_map(rows, output, session, prompt="{q}")
    assert len(session.sent) == 200
    written = sorted(read_output(output), key=lambda row: int(row["id"][1:]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])


def test_ctrl_c_in_the_last_step_is_not_lost(output: Path) -> None:
    """The job ends, and the program is interrupted nevertheless."""

    class Interrupting(InstantSession):
        def answer(self, line: Any) -> Answer:
            signal.raise_signal(signal.SIGINT)
            return super().answer(line)

    with pytest.raises(KeyboardInterrupt):
        call_map([{"q": "a"}], output, Interrupting(), prompt="q")
    assert read_output(output)[0]["answer"] == "a → 1"
    assert call_map([{"q": "a"}], output, prompt="q").num_skipped == 1


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_error_that_quotes_half_of_a_surrogate_pair_can_be_stored(output: Path, form: str) -> None:
    def refuse(row: dict[str, Any]) -> str:
        raise ValueError(f"no prompt for {row['q']}")

    call_map([{"q": "\ud800"}], output, prompt=refuse, format=form)
    assert read_output(output)[0]["error"] == "the function of prompt= failed: ValueError: no prompt for \ufffd"


def test_a_pattern_does_not_match_the_output_of_its_own_job(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rows.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    for num_skipped in (0, 2):
        summary = call_map(str(tmp_path / "**/*.jsonl"), tmp_path / "in/out", prompt="q")
        assert (summary.num_rows, summary.num_skipped) == (2, num_skipped)


def test_columns_of_another_type_are_another_job(output: Path) -> None:
    call_map(pa.table({"q": ["a"], "x": pa.array([1], pa.int64())}), output, prompt="q")
    with pytest.raises(JobChanged, match=r'"x: int64".*"x: int32"'):
        call_map(pa.table({"q": ["a"], "x": pa.array([1], pa.int32())}), output, prompt="q")


@pytest.mark.parametrize("weights", ["model.safetensors", "gguf.json"])
def test_another_model_of_the_same_name_is_another_job(output: Path, tmp_path: Path, weights: str) -> None:
    first, second, copy = (tmp_path / run / "final" for run in ("1", "2", "copy"))
    for seed, path in enumerate((first, second)):
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / weights).write_bytes(np.random.default_rng(seed).bytes(1_000_000))
    shutil.copytree(first, copy)
    (copy / "eval_results.json").write_text("{}")
    rows = make_rows(100)
    call_map(rows[:50], output, model_files=find_model_files(first), prompt="{q}", key="id")
    match = f"has answers of the model in {first}, and that in {second} has other files or other contents"
    with pytest.raises(JobChanged, match=match):
        call_map(rows, output, model_files=find_model_files(second), prompt="{q}", key="id")
    for known in (find_model_files(copy), None):
        assert call_map(rows, output, model_files=known, prompt="{q}", key="id").num_rows == 100
    assert find_model_files(tmp_path / "none") is None
    updated = find_model_files(first, second)
    assert updated not in (find_model_files(first), find_model_files(second))
    with pytest.raises(JobChanged, match=f"and that in {second} has other"):
        call_map(rows, output, model_files=updated, prompt="{q}", key="id")


def test_a_job_of_another_version_is_refused_before_its_files_are_read(output: Path) -> None:
    call_map([{"q": "a"}], output, prompt="q")
    root = output.with_name("out.toka")
    (root / "job.json").write_text('{"version": 99}')
    for index in root.glob("index-*.npy"):
        index.write_bytes(b"of another version")
    with pytest.raises(JobChanged, match="begun by another version"):
        call_map([{"q": "a"}], output, prompt="q")
    assert call_map([{"q": "a"}], output, prompt="q", overwrite=True).num_skipped == 0


@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
@pytest.mark.parametrize("n", [1, 2])
def test_with_tools_the_calls_are_a_column(format_name: str, n: int, output: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'}

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["tools"] == tools
        whole = completion(body, "calm", "tool_calls")
        function = {"name": call["name"], "arguments": call["arguments"]}
        for choice in whole["choices"]:
            if body["messages"][0]["content"] == "call":
                choice["message"] = {"content": None, "tool_calls": [{"id": "c1", "function": function}]}
        packed = dict.fromkeys(("packed_chosen_logprobs", "packed_topk_indices", "packed_topk_logprobs"))
        whole["system_fingerprint"] = json.dumps({"completion_ids": [[1]] * n, **packed})
        whole["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        return 200, whole

    arguments: dict[str, Any] = {"prompt": "{q}", "chat": True, "format": format_name}
    call_map(
        [{"q": "call"}, {"q": "no"}], output, InstantSession(respond=answer), Sampling(n=n), tools=tools, **arguments
    )
    calls = [row["tool_calls"] for row in read_output(output)]
    assert calls == ([[[call]] * n, [[]] * n] if n > 1 else [[call], []])


def test_relative_paths_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("parquet", "jsonl"):
        home = tmp_path / suffix
        (home / "elsewhere").mkdir(parents=True)
        monkeypatch.chdir(home)
        if suffix == "parquet":
            pq.write_table(pa.table({"q": ["x", "y"]}), "in.parquet")
        else:
            Path("in.jsonl").write_text('{"q": "x"}\n{"q": "y"}\n')

        def prompt(row: dict[str, Any], home: Path = home) -> str:
            os.chdir(home / "elsewhere")
            return str(row["q"])

        summary = call_map(f"in.{suffix}", Path("out"), prompt=prompt)
        assert summary.output == home / "out"
        monkeypatch.chdir(home)
        assert call_map(f"*.{suffix}", Path("out"), prompt=prompt).num_skipped == 2
        assert [row["answer"] for row in read_output(home / "out")] == ["x → 1", "y → 1"]
