"""`toka map` against a real HTTP server, and with an engine of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.server.helpers.live_server import LiveServer
from tokasaurus.cli import main

RUN = "import sys; from tokasaurus.cli import main; sys.exit(main())"


def write_rows(path: Path, count: int) -> list[str]:
    """Flags of a job over the file."""
    path.write_text("".join(json.dumps({"id": number, "q": f"text {number}"}) + "\n" for number in range(count)))
    return ["map", f"input={path}", f"output={path.parent / 'out'}", "prompt={q}", "key=id"]


def read_rows(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for path in sorted(output.iterdir()) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["id"]))


def test_every_row_is_answered_and_the_same_command_has_nothing_to_do(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 40), f"base_url={server.url}/v1"]
    assert main(words) == 0
    rows = read_rows(tmp_path / "out")
    assert [(row["id"], row["answer"], row["error"]) for row in rows] == [
        (number, f"text {number}", None) for number in range(40)
    ]
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"40 rows answered, 0 errors, \d+ tokens, [\d.]+ s, [\d.,]+ tokens/s", first)
    assert last == f"the rows are in {tmp_path / 'out'}"
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("0 rows answered, 0 errors, 40 done before, 0 tokens")
    assert "40 rows are done already" in err


def test_samples_in_parquet_with_a_prefix(server: LiveServer, tmp_path: Path) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 3), f"base_url={server.url}", "n=2", "format=parquet", "prefix=m_"]
    assert main([*words, "max_tokens=2"]) == 0
    (path,) = (tmp_path / "out").iterdir()
    rows = pq.read_table(path).to_pylist()
    assert all(row["m_answer"] == [row["m_answer"][0]] * 2 for row in rows)
    assert rows[0]["m_finish_reason"] == ["length", "length"]


def test_rows_with_errors_are_computed_again_with_further_columns(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 8), f"base_url={server.url}", "columns=token_ids, seed", "seed=3"]
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('no JSON\n{"id": 9, "q": null}\n{"id": 10, "q": null}\n')
    assert main(words) == 1, "rows failed"
    rows = [json.loads(line) for line in (tmp_path / "out" / "part-000000.jsonl").read_text().splitlines()]
    assert [row["error"] is not None for row in rows] == [False] * 8 + [True] * 3
    assert "line 9 is not JSON" in rows[8]["error"]
    assert (bytes(rows[0]["token_ids"][:3]), rows[0]["seed"], rows[8]["seed"]) == (b"tex", 3, None)
    first, *reasons, last = capsys.readouterr().out.splitlines()
    assert first.startswith("8 rows answered, 3 errors, ")
    assert [reason.partition(":")[0] for reason in reasons] == ["failed"] * 2
    assert reasons[0] == "failed: 2 x no_prompt: there is no prompt: the column 'q' is null"
    assert re.match(r"failed: 1 x bad_row: .*line 9 is not JSON", reasons[1]), reasons
    again = "with retry_errors=T, the same command computes rows with errors again"
    assert last == f"the rows are in {tmp_path / 'out'}; {again}"
    write_rows(tmp_path / "in.jsonl", 11)
    assert main([*words, "retry_errors=T"]) == 0
    out = capsys.readouterr().out
    assert "3 rows answered, 0 errors, 8 done before" in out
    assert "failed" not in out
    assert [(row["id"], row["answer"], row["error"]) for row in read_rows(tmp_path / "out")] == [
        (number, f"text {number}", None) for number in range(11)
    ]
    assert main([*(word for word in words if "columns=" not in word), "columns=ids"]) == 1
    assert "columns: 'ids' must be one of token_ids, logprobs" in capsys.readouterr().err


def test_what_is_wrong_with_the_input_is_said_before_a_server_is_sought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = "base_url=http://127.0.0.1:1/v1"
    words = write_rows(tmp_path / "in.jsonl", 3)
    for wrong, line in (
        ("prompt={question}", "has no column 'question'; its columns are id, q"),
        ("key=uid", "has no such column; its columns are id, q"),
        (f"input={tmp_path / 'no.jsonl'}", "no.jsonl: no such file"),
    ):
        name = wrong.partition("=")[0]
        assert main([*(word for word in words if not word.startswith(f"{name}=")), wrong, nowhere]) == 1
        err = capsys.readouterr().err
        assert err.startswith("toka map: ")
        assert err.endswith(f"{line}\n")
        assert err.count("\n") == 1
    assert main([*words, nowhere]) == 1
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_changed_job_is_refused_in_one_line(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 3), f"base_url={server.url}"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "temperature=0.5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "temperature was null and is 0.5" in line
    assert main([*words, "temperature=0.5", "overwrite=T"]) == 0


def test_ctrl_c_stores_what_has_finished_and_the_same_command_goes_on(server: LiveServer, tmp_path: Path) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 60_000), f"base_url={server.url}"]
    process = subprocess.Popen([sys.executable, "-c", RUN, *words], stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "out.toka" / "journal-000000.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.stat().st_size < 10_000:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "toka map: stopped; the same command continues where it was"
    stored = read_rows(tmp_path / "out")
    assert 0 < len(stored) < 60_000
    assert all(row["answer"] == f"text {row['id']}" for row in stored)
    write_rows(tmp_path / "in.jsonl", 5)
    assert main(words) == 0, "also with other rows: these are done"


@pytest.mark.long
def test_an_engine_of_its_own_needs_no_server(tmp_path: Path) -> None:
    words = [*write_rows(tmp_path / "in.jsonl", 20), "max_tokens=5", "kv_cache_num_tokens=4096", "temperature=0"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "20 rows answered, 0 errors" in done.stdout
    assert [row["finish_reason"] for row in read_rows(tmp_path / "out")] == ["length"] * 20
