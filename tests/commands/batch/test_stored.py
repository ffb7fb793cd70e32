"""`toka batch list`, `show` and `cancel`, while a server runs and while none does."""

import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from tests.commands.batch.helpers.request_lines import request_line, write_requests
from tests.server.helpers.fake_engine import FakeEngine, never
from tests.server.helpers.live_server import live_server
from tokasaurus.cli import batch_main
from tokasaurus.commands.batch import api
from tokasaurus.server.jobs.store.database import MIGRATIONS, open_connection
from tokasaurus.server.jobs.store.store import default_data_dir
from tokasaurus.server.served_model import ServedModel


def make_batch(url: str, source: Path, api_key: str = "none") -> str:
    """The id of a new batch."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=api_key) as client, source.open("rb") as content:
        uploaded = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
        )
    return batch.id


def wait_for(data_dir: Path, status: str) -> None:
    deadline = time.monotonic() + 60
    with closing(open_connection(data_dir / "database.sqlite", can_write=False)) as connection:
        while {row[0] for row in connection.execute("SELECT status FROM batches")} != {status}:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def output_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert batch_main(words) == 0
    return capsys.readouterr().out


def test_batches_are_seen_during_and_after_a_server_and_cancelled_without_one(
    served_model: ServedModel, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"data_dir={data_dir}"
    with live_server(served_model, FakeEngine(script=never), data_dir=data_dir) as server:
        assert output_of(["list", flag], capsys) == f"{data_dir} has no batches\n"
        batch_id = make_batch(server.url, write_requests(tmp_path / "in.jsonl", 5))
        wait_for(data_dir, "in_progress")
        assert "in_progress  0 of 5 lines done, 0 failed  /v1/completions\n" in output_of(["list", flag], capsys)
        shown = json.loads(output_of(["show", batch_id, flag, "json=T"], capsys))
        told = server.http.get(f"/v1/batches/{batch_id}").json()
        del told["progress"]  # which only the server knows
        assert shown == told
        address = f"base_url={server.url}/v1"
        assert json.loads(output_of(["show", batch_id, address, "json=T"], capsys)) == {
            **told,
            "progress": {"generated_tokens": 0},
        }
        assert output_of(["list", address], capsys) == output_of(["list", flag], capsys)
        described = output_of(["show", batch_id, address], capsys)
        assert described.replace('progress           {"generated_tokens":0}\n', "") == output_of(
            ["show", batch_id, flag], capsys
        )
        assert batch_main(["show", "batch_0", address]) == 1
        assert f"toka batch: {server.url}/v1 answered 404: " in capsys.readouterr().err
    shown_again = json.loads(output_of(["show", batch_id, flag, "json=T"], capsys))
    assert shown_again == shown
    assert output_of(["list", flag, "json=T"], capsys) == json.dumps(shown, separators=(",", ":")) + "\n"
    assert batch_id in output_of(["cancel", batch_id, flag], capsys)
    assert "status             cancelling\n" in output_of(["show", batch_id, flag], capsys)
    engine = FakeEngine(script=never)
    with live_server(served_model, engine, data_dir=data_dir) as server:
        wait_for(data_dir, "cancelled")
        assert server.http.get(f"/v1/batches/{batch_id}").json()["request_counts"]["failed"] == 5
    assert not engine.requests
    assert output_of(["cancel", batch_id, flag], capsys) == f"{batch_id} is cancelled\n"


def test_list_reads_a_servers_pages_up_to_its_limit(
    served_model: ServedModel,
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api, "_MAX_PER_PAGE", 2)
    source = write_requests(tmp_path / "in.jsonl", 1)
    with live_server(served_model, FakeEngine(script=never), data_dir=data_dir) as server:
        batches = [make_batch(server.url, source) for _ in range(5)][::-1]
        for limit in (1, 3, 4, 5, 6):
            *lines, last = output_of(["list", f"base_url={server.url}/v1", f"limit={limit}"], capsys).splitlines()
            if limit >= 5:
                lines.append(last)
            else:
                assert last == f"and older ones (limit={limit})"
            assert [line.split()[0] for line in lines] == batches[:limit]


def test_the_key_of_the_flag_comes_before_the_environments(
    served_model: ServedModel,
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOKA_API_KEY", "of-another-server")
    flag = f"data_dir={data_dir}"
    with live_server(served_model, FakeEngine(script=never), api_key="secret", data_dir=data_dir) as server:
        batch_id = make_batch(server.url, write_requests(tmp_path / "in.jsonl", 5), "secret")
        (data_dir / "lock").write_text(server.url)  # as `toka` writes it
        assert batch_main(["cancel", batch_id, flag]) == 1
        assert "answered 401: " in capsys.readouterr().err
        assert output_of(["cancel", batch_id, flag, "api_key=secret"], capsys) == f"{batch_id} is cancelling\n"


def test_a_server_on_a_unix_socket_cancels_a_batch(
    served_model: ServedModel, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_server(served_model, FakeEngine(script=never), data_dir=data_dir) as server:
        batch_id = make_batch(server.url, write_requests(tmp_path / "in.jsonl", 5))
        wait_for(data_dir, "in_progress")
    with tempfile.TemporaryDirectory() as directory:
        flags = {"data_dir": data_dir, "unix_socket": f"{directory}/socket"}
        with live_server(served_model, FakeEngine(script=never), **flags) as server:
            (data_dir / "lock").write_text(server.url)  # as `toka` writes it
            assert output_of(["cancel", batch_id, f"data_dir={data_dir}"], capsys) == f"{batch_id} is cancelling\n"
            assert batch_main(["cancel", "batch_0", f"data_dir={data_dir}"]) == 1
            assert "has no batch batch_0; " in capsys.readouterr().err


def test_show_names_the_bad_lines(
    served_model: ServedModel, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request_line("a") + request_line("b").replace("POST", "GET") + request_line("c", url="/v1/x"))
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        batch_id = make_batch(server.url, source)
        wait_for(data_dir, "failed")
    lines = output_of(["show", batch_id, f"data_dir={data_dir}"], capsys).splitlines()
    assert 'metadata           {"who":"me"}' in lines
    assert [line for line in lines if line.startswith("error ")] == [
        "error              line 2: method must be POST (invalid_method)",
        "error              line 3: url must be the batch's endpoint, /v1/completions (mismatched_endpoint)",
    ]


def test_list_shows_the_newest(
    served_model: ServedModel, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        ids = [make_batch(server.url, source) for _ in range(3)]
        wait_for(data_dir, "completed")
    lines = output_of(["list", f"data_dir={data_dir}", "limit=2"], capsys).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ids[:0:-1]
    assert lines[2] == "and older ones (limit=2)"


@pytest.mark.parametrize("words", [["list"], ["show", "batch_1"], ["cancel", "batch_1"]])
def test_a_directory_without_batches_is_one_line_and_is_not_made(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent"
    assert batch_main([*words, f"data_dir={absent}"]) == 1
    text = "has no batches: no server has stored any there (data_dir=, or port=, names another)"
    assert capsys.readouterr().err == f"toka batch: {absent} {text}\n"
    assert not absent.exists()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert batch_main([*words, "port=7"]) == 1
    assert capsys.readouterr().err == f"toka batch: {default_data_dir(7)} {text}\n"


def test_what_cannot_be_done_is_one_line(
    served_model: ServedModel, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"data_dir={data_dir}"
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        assert batch_main(["cancel", "batch_1", flag]) == 1
        assert capsys.readouterr().err == f"toka batch: {data_dir} is in use (a test); try again\n"
        (data_dir / "lock").write_text(server.url)
        assert batch_main(["cancel", "batch_1", flag]) == 1
        line = f"{data_dir} has no batch batch_1; toka batch list shows those there are"
        assert capsys.readouterr().err == f"toka batch: {line}\n"
    assert output_of(["list", flag, "json=T"], capsys) == ""
    for action in ("show", "cancel"):
        assert batch_main([action, "batch_1", flag]) == 1
        line = f"{data_dir} has no batch batch_1; toka batch list shows those there are"
        assert capsys.readouterr().err == f"toka batch: {line}\n"
    database = data_dir / "database.sqlite"
    with closing(apsw.Connection(str(database))) as connection:
        connection.pragma("user_version", 99)
    assert batch_main(["list", flag]) == 1
    assert f"has the version 99, and this Tokasaurus reads version {len(MIGRATIONS)}:" in capsys.readouterr().err
    database.write_bytes(os.urandom(8192))
    assert batch_main(["list", flag]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_cancelling_a_finished_batch_is_refused_alike_with_and_without_a_server(
    served_model: ServedModel, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"data_dir={data_dir}"
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        batch_id = make_batch(server.url, write_requests(tmp_path / "in.jsonl", 2))
        wait_for(data_dir, "completed")
        (data_dir / "lock").write_text(server.url)  # as `toka` writes it
        assert batch_main(["cancel", batch_id, flag]) == 1
        with_server = capsys.readouterr()
        assert batch_main(["cancel", batch_id, f"base_url={server.url}/v1"]) == 1
        assert capsys.readouterr() == with_server
    assert batch_main(["cancel", batch_id, flag]) == 1
    assert capsys.readouterr() == with_server
    assert with_server == ("", f"toka batch: {batch_id} cannot be cancelled: it is completed\n")


@pytest.mark.parametrize("words", [["list"], ["show", "batch_1"], ["cancel", "batch_1"]])
def test_a_directory_that_cannot_be_read_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert batch_main([*words, f"data_dir={name}"]) == 1
    assert capsys.readouterr().err == f"toka batch: cannot read {name}: File name too long\n"
    home = "~no-such-user/x"
    assert batch_main([*words, f"data_dir={home}"]) == 1
    text = "there is no such home directory; data_dir= names another directory"
    assert capsys.readouterr().err == f"toka batch: data_dir={home}: {text}\n"
