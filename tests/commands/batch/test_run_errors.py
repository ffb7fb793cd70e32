"""Runs that cannot go on: what they say, and what they leave."""

import socket
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from tests.commands.batch.helpers.dropping_proxy import proxy_before
from tests.commands.batch.helpers.request_lines import read_results, request_line, write_requests
from tests.commands.batch.helpers.runs import start, wait_for_batch, wait_for_lines
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.cli import batch_main
from tokasaurus.commands.batch.input_file import fingerprint
from tokasaurus.commands.batch.state_file import RunState
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel


def test_a_bad_file_is_explained_and_a_corrected_one_can_be_run(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request_line("a") + "{\n" + request_line("a") * 30)
    assert batch_main(words) == 1
    lines = capsys.readouterr().err.splitlines()[-22:]
    assert lines[0] == f"toka batch: input={source} is bad:"
    assert server.http.get("/v1/files").json()["data"] == [], "it is checked before it is uploaded"
    assert lines[1].startswith("line 2: the line is not valid JSON")
    assert lines[2] == "line 3: custom_id is also that of line 1"
    assert lines[20].startswith("line 21: ")
    assert lines[21] == "and 11 more"
    assert not server.engine.requests
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl"]
    write_requests(source, 3)
    assert batch_main(words) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no lines"),
        ("x\n", "line 1: must be a JSON object"),
        (request_line("a", url="/v1/moderations"), "answered 400: "),
    ],
)
def test_a_file_that_cannot_be_a_batch_leaves_nothing_behind(
    words: list[str], tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    assert batch_main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("toka batch: ")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl"]


def test_a_batch_that_the_server_has_lost_says_what_to_delete(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_path = tmp_path / "out.jsonl.toka.json"
    found = fingerprint(tmp_path / "in.jsonl")
    state = RunState(found.num_bytes, found.sha256, words[2].removeprefix("base_url="), file_id="file-gone")
    for stored in (state, replace(state, batch_id="batch_gone")):
        state_path.write_bytes(orjson.dumps(asdict(stored)))
        assert batch_main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert " answered 404: " in line
        assert line.endswith(f"; delete {state_path} to begin again")
        assert state_path.exists()


def test_an_output_that_was_deleted_on_the_server_says_what_to_delete(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.script = never
    process = start(words)
    wait_for_batch(tmp_path / "out.jsonl.toka.json")
    wait_for_lines(server, 0, "in_progress")
    process.kill()
    process.communicate()
    (batch,) = server.http.get("/v1/batches").json()["data"]
    server.http.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status()
    wait_for_lines(server, 0, "cancelled")
    (batch,) = server.http.get("/v1/batches").json()["data"]
    server.http.delete(f"/v1/files/{batch['error_file_id']}").raise_for_status()
    assert batch_main(words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "its results cannot be written: " in line
    assert " answered 404: " in line
    assert line.endswith(f"; delete {tmp_path / 'out.jsonl.toka.json'} to begin again")


def test_a_base_url_without_a_version_is_explained_where_a_server_needs_one(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with proxy_before(f"{server.url}/elsewhere") as other:
        assert batch_main([*words[:2], f"base_url={other.url}"]) == 1
    message = f"toka batch: {other.url} answered 404: unknown route: POST /elsewhere/files"
    assert capsys.readouterr().err == f"{message} (the URL of an OpenAI API ends in /v1)\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl"]


def test_a_server_of_this_project_needs_no_version_in_its_base_url(
    words: list[str], server: LiveServer, tmp_path: Path
) -> None:
    assert batch_main([*words[:2], f"base_url={server.url}"]) == 0
    assert len(read_results(tmp_path / "out.jsonl")) == 30


def test_another_completion_window_than_the_batch_has_is_refused(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.script = never
    process = start([*words, "completion_window=2h"])
    wait_for_batch(tmp_path / "out.jsonl.toka.json")
    process.kill()
    process.communicate()
    assert batch_main([*words, "completion_window=3h"]) == 1
    err = capsys.readouterr().err
    assert "completion_window=3h: the batch was begun with 2h: leave the flag out to continue it, or delete " in err


def test_an_output_that_appears_meanwhile_is_kept(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    part.write_text("precious")

    def write_and_echo(request: GenerateRequest, index: int) -> Reply | None:
        output.write_text("of another program")
        return echo(request, index)

    server.engine.script = write_and_echo
    assert batch_main(words) == 1
    assert capsys.readouterr().err.endswith(f"toka batch: {output} exists; overwrite=T replaces it\n")
    assert output.read_text() == "of another program"
    assert batch_main([*words, "overwrite=T"]) == 0
    assert len(read_results(output)) == 30
    assert len(server.engine.requests) == 30
    assert part.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl", "out.jsonl", "out.jsonl.part"]


def test_a_path_that_cannot_be_looked_at_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert batch_main([words[0], f"output={name}", words[2]]) == 1
    assert capsys.readouterr().err == f"toka batch: output={name}: File name too long\n"


def test_without_a_server_the_error_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert batch_main([*words[:2], f"base_url=http://127.0.0.1:{port}/v1"]) == 1
    line = (
        f"toka batch: no answer from http://127.0.0.1:{port}/v1: [Errno 111] Connection refused; is the server running?"
    )
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_a_server_with_a_key_or_without_batches_refuses_at_once(
    served_model: ServedModel, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with live_server(served_model, FakeEngine(), api_key="secret") as server:
        words = [*words[:2], f"base_url={server.url}/v1"]
        assert batch_main(words) == 1
        assert f"{server.url}/v1 answered 401: " in capsys.readouterr().err
        assert batch_main([*words, "api_key=secret"]) == 1
        assert f"{server.url}/v1 answered 501: " in capsys.readouterr().err
