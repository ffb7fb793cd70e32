"""Runs with `base_url=`, against a real HTTP server."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import orjson
import pytest

from tests.commands.batch.helpers.dropping_proxy import proxy_before
from tests.commands.batch.helpers.request_lines import read_results, request_line, text_of, write_requests
from tests.commands.batch.helpers.runs import RUN, start, wait_for_batch, wait_for_lines, wait_until
from tests.helpers.pipes import read_until
from tests.server.helpers.fake_engine import Reply, echo, never
from tests.server.helpers.live_server import LiveServer
from tokasaurus.cli import batch_main
from tokasaurus.commands.batch import run as run_module
from tokasaurus.commands.batch.run import ALL_FAILED
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.jobs.service import BatchService


def test_the_output_has_a_line_for_each_line_in_their_order(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": "nobody"} if index % 5 == 0 else {} for index in range(40)]
    source.write_text("\n".join(request_line(f"c{index}", **body) for index, body in enumerate(bodies)))
    assert batch_main([f"input={source}", f"output={output}", f"base_url={server.url}/v1"]) == 0
    results = read_results(output)
    assert [result["custom_id"] for result in results] == [f"c{index}" for index in range(40)]
    for index, result in enumerate(results):
        if index % 5 == 0:
            assert result["response"]["status_code"] == 404
        else:
            assert text_of(result) == f"text c{index}"
    tokens = sum(len(f"text c{index}") for index in range(40) if index % 5)
    captured = capsys.readouterr()
    told = [line for line in captured.err.splitlines() if line.startswith("a line failed: ")]
    assert len(told) <= 1, "each reason once, if the run was long enough"
    assert all("model_not_found: the model 'nobody' does not exist" in line for line in told)
    first, reason, last = captured.out.splitlines()
    # the fake engine's answers end by length
    summary = rf"32 lines completed \(32 cut by length\), 8 failed, {tokens} tokens, [\d.]+ s, [\d.,]+ tokens/s"
    assert re.fullmatch(summary, first)
    assert reason.startswith("failed: 8 x model_not_found: the model 'nobody' does not exist")
    assert last == f"the results are in {output}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl", "out.jsonl"]


def test_the_exit_code_says_that_every_line_failed_also_if_the_run_was_killed_at_its_very_end(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = [f"input={source}", f"output={output}", f"base_url={server.url}/v1", "overwrite=T"]
    for models, code in ((["nobody", "nobody"], ALL_FAILED), (["nobody", "default"], 0)):
        source.write_text("".join(request_line(f"c{n}", model=model) for n, model in enumerate(models)))
        assert batch_main(words) == code
        assert len(read_results(output)) == 2
        with monkeypatch.context() as patch:
            patch.setattr(run_module.StateFile, "remove", interrupt)
            assert batch_main(words) == 130
        assert batch_main(words) == code


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_existing_output_is_replaced_only_on_demand(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    assert batch_main(words) == 1
    assert capsys.readouterr().err == f"toka batch: output={output}: exists; overwrite=T replaces it\n"
    assert output.read_text() == "precious"
    assert not server.engine.requests
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl", "out.jsonl"]
    assert batch_main([*words, "overwrite=T"]) == 0
    assert len(read_results(output)) == 30


def test_ctrl_c_says_how_to_continue_and_the_same_batch_continues(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.script = answer_short
    write_requests(tmp_path / "in.jsonl", 30)
    process = start(words)
    wait_for_lines(server, 10)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    (batch,) = server.http.get("/v1/batches").json()["data"]
    cancel = ["cancel", batch["id"], words[2]]
    assert err.splitlines()[-1] == (
        f"toka batch: stopped; {batch['id']} goes on running on the server (toka batch {' '.join(cancel)} ends it); "
        "the same command continues where it was"
    )
    assert not (tmp_path / "out.jsonl").exists()
    server.engine.script = echo
    assert batch_main(cancel) == 0
    assert capsys.readouterr().out == f"{batch['id']} is cancelling\n"
    state, partial = tmp_path / "out.jsonl.toka.json", tmp_path / "out.jsonl.partial"
    expected = (
        f"toka batch: {batch['id']} is cancelled, with 10 of 30 lines completed; its results are in {partial}; "
        f"delete {state} to begin again"
    )
    for _ in range(2):  # the same results may be written again
        assert batch_main(words) == 1
        assert capsys.readouterr().err.splitlines()[-1] == expected
    results = read_results(partial)
    assert [result["custom_id"] for result in results] == [f"c{index}" for index in range(30)]
    assert [text_of(result) for result in results[:10]] == [f"text c{index}" for index in range(10)]
    assert {result["error"]["code"] for result in results[10:]} == {"batch_cancelled"}
    assert len(server.http.get("/v1/batches").json()["data"]) == 1
    assert not (tmp_path / "out.jsonl").exists()
    assert batch_main(cancel) == 0
    partial.write_text("precious")
    assert batch_main(words) == 1
    assert f"its results cannot be written: {partial} exists; overwrite=T replaces it; " in capsys.readouterr().err
    assert partial.read_text() == "precious"
    state.unlink()
    assert batch_main(words) == 0
    assert len(read_results(tmp_path / "out.jsonl")) == 30


def answer_short(request: GenerateRequest, index: int) -> Reply | None:
    """Answers c0 to c9 of 30."""
    return echo(request, index) if len(request.prompt_ids) == len("text c0") else None


def test_after_a_kill_the_same_batch_continues_and_no_line_runs_twice(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    may_go_on = threading.Event()

    def answer_ten_and_wait(request: GenerateRequest, index: int) -> Reply | None:
        if len(server.engine.requests) > 10:
            may_go_on.wait(60)
        return echo(request, index)

    server.engine.script = answer_ten_and_wait
    process = start(words)
    wait_for_lines(server, 10)
    so_far = tmp_path / "out.jsonl.toka.partial"
    process.kill()
    process.communicate()
    assert not (tmp_path / "out.jsonl").exists()
    first_results = so_far.read_bytes() if so_far.exists() else b""  # the ten need not be the first ten
    threading.Timer(0.5, may_go_on.set).start()
    assert batch_main(words) == 0
    assert may_go_on.is_set()
    (batch,) = server.http.get("/v1/batches").json()["data"]
    words_of_it = rf"continuing {batch['id']}: [123]\d of 30 lines are done already\n"
    assert re.search(words_of_it, capsys.readouterr().err)
    assert [text_of(result) for result in read_results(tmp_path / "out.jsonl")] == [f"text c{n}" for n in range(30)]
    assert len(server.http.get("/v1/batches").json()["data"]) == 1
    assert len(server.engine.requests) == 30
    assert (tmp_path / "out.jsonl").read_bytes().startswith(first_results)
    assert not so_far.exists()


def test_results_so_far_are_readable_up_to_the_first_line_without_one(
    words: list[str], server: LiveServer, tmp_path: Path
) -> None:
    """Line 12 has no answer until the end: later results are not shown before it."""
    so_far = tmp_path / "out.jsonl.toka.partial"

    def answer_all_but_one(request: GenerateRequest, index: int) -> Reply | None:
        return None if bytes(request.prompt_ids.tolist()) == b"text c12" else echo(request, index)

    server.engine.script = answer_all_but_one
    process = start(words)
    wait_for_lines(server, 29)
    wait_until(lambda: so_far.exists() and len(read_results(so_far)) >= 12)
    assert [result["custom_id"] for result in read_results(so_far)] == [f"c{index}" for index in range(12)]
    (batch,) = server.http.get("/v1/batches").json()["data"]
    asked = server.http.get(f"/v1/batches/{batch['id']}/results", params={"first": 13})
    assert asked.headers["content-type"] == "application/x-ndjson"
    assert [orjson.loads(line)["custom_id"] for line in asked.content.splitlines()] == [f"c{n}" for n in range(13, 30)]
    assert server.http.get(f"/v1/batches/{batch['id']}/results", params={"first": 12}).content == b""
    assert server.http.get("/v1/batches/batch_0/results").status_code == 404
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert f"results so far, in the order of the input: {so_far}\n" in err
    assert batch_main(["cancel", batch["id"], words[2]]) == 0
    assert batch_main(words) == 1
    assert not so_far.exists(), "all results are in out.jsonl.partial"


def test_a_run_says_why_lines_failed_and_why_the_batch_waits(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchService, "problem", lambda *_: "no space is left on the device of data_dir")
    server.engine.script = never
    source = tmp_path / "in.jsonl"
    source.write_text(request_line("a", model="nobody") + request_line("b", n=0) + request_line("c"))
    process = start([f"input={source}", f"output={tmp_path / 'out.jsonl'}", f"base_url={server.url}/v1"])
    so_far = tmp_path / "out.jsonl.toka.partial"
    wait_until(lambda: so_far.exists() and len(read_results(so_far)) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "; waits: no space is left on the device of data_dir\n" in err
    told = [line.partition(": ")[2] for line in err.splitlines() if line.startswith("a line failed: ")]
    assert [line.partition(":")[0] for line in told] == ["model_not_found", "invalid_value"]


def test_a_second_command_on_the_same_output_is_refused(
    words: list[str], server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.script = never
    process = start(words)
    wait_for_lines(server, 0)
    assert batch_main(words) == 1
    assert "another toka batch is at work on this output" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_an_input_that_is_changed_meanwhile_ends_the_run(words: list[str], server: LiveServer, tmp_path: Path) -> None:
    server.engine.script = never
    source, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    process = start(words)
    wait_for_lines(server, 0, "in_progress")
    other.write_bytes(source.read_bytes())
    other.replace(source)  # as an editor saves a file: its content is the same
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    source.write_bytes(source.read_bytes().replace(b"c7", b"d7"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.endswith(f"toka batch: input={source}: was changed while the batch ran\n")


def test_a_changed_input_says_what_to_delete(
    words: list[str], server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.script = never
    source, state = tmp_path / "in.jsonl", tmp_path / "out.jsonl.toka.json"
    process = start(words)
    wait_for_batch(state)
    process.kill()
    process.communicate()
    content = source.read_bytes()
    source.write_bytes(content.replace(b"c7", b"d7"))
    assert batch_main(words) == 1
    line = f"input={source}: was changed since its batch was begun; delete {state} to begin again"
    assert capsys.readouterr().err == f"toka batch: {line}\n"
    assert batch_main(words[:2]) == 1
    line = f"a run with base_url= is not complete: continue it so, or delete {state} to begin again"
    assert capsys.readouterr().err == f"toka batch: {line}\n"
    source.write_bytes(content)
    assert batch_main([*words[:2], "base_url=http://127.0.0.1:1/v1"]) == 1
    assert f"the batch was begun with {words[2]}; delete {state}" in capsys.readouterr().err


def test_an_interruption_after_the_output_is_complete_is_a_success(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_module.StateFile, "remove", interrupt)
        assert batch_main(words) == 128 + signal.SIGINT
    content = (tmp_path / "out.jsonl").read_bytes()
    assert (tmp_path / "out.jsonl.toka.json").exists()
    assert batch_main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.jsonl'} is complete already\n"
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert not (tmp_path / "out.jsonl.toka.json").exists()


def test_an_output_of_another_input_is_no_success(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_module.StateFile, "remove", interrupt)
        assert batch_main(words) == 128 + signal.SIGINT
    state = tmp_path / "out.jsonl.toka.json"
    capsys.readouterr()
    write_requests(tmp_path / "in.jsonl", 31)
    assert batch_main([*words, "overwrite=T"]) == 1
    line = f"input={tmp_path / 'in.jsonl'}: was changed since its batch was begun; delete {state} to begin again"
    assert capsys.readouterr() == ("", f"toka batch: {line}\n")
    write_requests(tmp_path / "in.jsonl", 30)
    assert batch_main([*words[:2], "base_url=http://127.0.0.1:1/v1"]) == 1
    assert f"the batch was begun with {words[2]}; delete {state}" in capsys.readouterr().err
    state.unlink()
    write_requests(tmp_path / "in.jsonl", 31)
    assert batch_main([*words, "overwrite=T"]) == 0
    assert len(read_results(tmp_path / "out.jsonl")) == 31


def test_lost_answers_are_asked_for_again_and_make_no_second_batch(
    words: list[str], server: LiveServer, tmp_path: Path
) -> None:
    with proxy_before(server.url) as proxy:
        proxy.lost = ["POST /v1/batches", "POST /v1/files"]
        proxy.unavailable, proxy.cut = 1, 1
        assert batch_main([*words[:2], f"base_url={proxy.url}/v1"]) == 0
        assert proxy.passed.count("POST /v1/batches") == 1
        assert (proxy.lost, proxy.cut) == ([], 0)
    assert len(server.http.get("/v1/batches").json()["data"]) == 1
    assert len(read_results(tmp_path / "out.jsonl")) == 30
    assert len(server.engine.requests) == 30


def test_on_a_terminal_there_is_a_bar(words: list[str], server: LiveServer) -> None:
    server.engine.script = never
    terminal, other_end = pty.openpty()
    command = [sys.executable, "-c", RUN, *words]
    process = subprocess.Popen(command, stderr=other_end, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    os.close(other_end)
    assert b"\x1b[" in read_until(terminal, lambda shown: b"0 of 30 lines done, 0 failed" in shown)
    process.send_signal(signal.SIGINT)
    read_until(terminal, lambda shown: b"the same command continues" in shown)
    assert process.wait(timeout=60) == 130
    os.close(terminal)
    (batch,) = httpx.get(f"{server.url}/v1/batches").json()["data"]
    server.http.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status()
