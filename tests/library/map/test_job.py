"""A call of `map` against a dict of expected rows: every row once, with its own answer or an error."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from tests.library.map.helpers.calls import call_map, expected_rows, without_messages
from tests.library.map.helpers.finished import read_output
from tests.library.map.helpers.instant_session import InstantSession, completion, respond
from tokasaurus.library.bulk import ServerError
from tokasaurus.library.map.journal import JobChanged, Journal, OutputFull
from tokasaurus.library.map.outputs import MapSummary, StoredOutput
from tokasaurus.library.map.shards import RowMisfit
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


def test_a_key_that_comes_again_stops_the_job_and_is_named(output: Path) -> None:
    rows = make_rows(3_000)
    rows[2_500]["id"] = "k17"
    for target in (output, None):
        with pytest.raises(ValueError, match="row 2500 of the rows: its key 'k17' is that of an earlier row"):
            call_map(rows, target, prompt="{q}", key="id")
    assert len({row["id"] for row in read_output(output)}) == len(read_output(output)) > 0


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


def test_a_prompt_that_is_mended_is_a_changed_job(output: Path) -> None:
    call_map([{"q": "x"}, {"q": "y"}], output, prompt=lambda row: None if row["q"] == "x" else "y")
    call_map([{"q": "x"}, {"q": "y"}], output, prompt=lambda row: 17 if row["q"] == "x" else "y")
    with pytest.raises(JobChanged, match="row 0 of the rows"):
        call_map([{"q": "x"}, {"q": "y"}], output, prompt=lambda row: row["q"])


def test_a_row_that_does_not_fit_stops_the_job_with_the_way_out(output: Path) -> None:
    rows = [*({"q": f"q{number}"} for number in range(2_000)), {"q": 17}]
    with pytest.raises(RowMisfit, match=r"row 2000 of the rows: its column 'q' is 17 \(int\).*format='jsonl'"):
        call_map(rows, output, prompt="{q}")
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


def test_a_job_of_another_version_is_refused_before_its_files_are_read(output: Path) -> None:
    call_map([{"q": "a"}], output, prompt="q")
    root = output.with_name("out.toka")
    (root / "job.json").write_text('{"version": 99}')
    for index in root.glob("index-*.npy"):
        index.write_bytes(b"of another version")
    with pytest.raises(JobChanged, match="begun by another version"):
        call_map([{"q": "a"}], output, prompt="q")
    assert call_map([{"q": "a"}], output, prompt="q", overwrite=True).num_skipped == 0


def test_keys_that_differ_in_each_process_are_refused(output: Path) -> None:
    with pytest.raises(TypeError, match="row 0 of the rows: its key is object"):
        call_map([{"id": object(), "q": "a"}], output, prompt="q", key="id")
    with pytest.raises(TypeError, match="its key is ndarray"):
        call_map([{"id": np.array([1, 2]), "q": "a"}], output, prompt="q", key="id")
