import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.throughput.__main__ import main
from benchmarks.throughput.measure import parse


def run(scripted_server: Any, *argv: str) -> int:
    return main([argv[0], "--base-url", scripted_server.base_url + "/", *argv[1:]])


def test_monkeys_run_writes_totals_that_the_server_confirms(
    scripted_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "monkeys.json"
    argv = ["--questions", "4", "--samples", "3", "--max-tokens", "5", "--warmup", "2", "--api-key", "secret"]
    assert run(scripted_server, "monkeys", *argv, "--output", str(output)) == 0
    report = json.loads(output.read_text())
    timed = scripted_server.bodies[2:]  # after the warm-up
    assert [(body["n"], body["max_tokens"], body["ignore_eos"]) for body in timed] == [(3, 5, True)] * 4
    summary = report["summary"]
    assert (summary["num_requests"], summary["num_failed"]) == (4, 0)
    assert summary["completion_tokens"] == 4 * 3 * 5
    assert summary["prompt_tokens"] == sum(len(body["prompt"].split()) for body in timed)
    assert summary["output_tokens_per_s"] == pytest.approx(60 / summary["wall_s"])
    assert [request["completion_tokens"] for request in report["requests"]] == [15] * 4
    assert report["server"] == {"model": "scripted", "version": {"version": "1.2.3"}}
    assert (report["config"]["questions"], report["config"]["concurrency"]) == (4, 0)
    assert "secret" not in output.read_text()
    assert "output tokens/s" in capsys.readouterr().out


def test_failures_are_shown_and_make_the_exit_code_1(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_server.status = lambda body: 500 if body["max_tokens"] > 100 else 200
    argv = ["--requests", "10", "--mean-tokens", "20", "--cap", "50", "--no-ignore-eos"]
    assert run(scripted_server, "sharegpt", *argv) == 0
    assert run(scripted_server, "sharegpt", "--requests", "10") == 1
    assert "HTTP 500" in capsys.readouterr().err


def test_wrong_token_count_is_a_failure(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def count_one_choice(body: dict[str, Any]) -> dict[str, Any]:
        answer = scripted_server.honest_answer(body)
        answer["usage"]["completion_tokens"] = body["max_tokens"]
        return answer

    scripted_server.answer = count_one_choice
    argv = ["monkeys", "--questions", "2", "--samples", "4"]
    assert run(scripted_server, *argv) == 1
    assert "--usage-per-choice" in capsys.readouterr().err
    assert run(scripted_server, *argv, "--usage-per-choice") == 0
    assert run(scripted_server, *argv, "--separate-samples") == 0


def test_file_load_and_chat_reach_their_routes(scripted_server: Any, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text(
        '{"prompt": "a", "max_tokens": 3, "arrival_s": 0}\n'
        '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3, "arrival_s": 0.05}\n'
    )
    assert run(scripted_server, "file", str(load), "--warmup", "0") == 0
    assert scripted_server.paths == ["completions", "chat/completions"]
    assert run(scripted_server, "sharegpt", "--requests", "2", "--chat") == 0
    assert set(scripted_server.paths[2:]) == {"chat/completions"}


def test_absent_server_is_one_error_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monkeys", "--base-url", "http://127.0.0.1:1/v1"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_failed_warm_up_ends_the_run(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_server.status = lambda _: 500
    assert run(scripted_server, "monkeys") == 1
    assert "warm-up" in capsys.readouterr().err
    assert len(scripted_server.bodies) == 1


@pytest.mark.parametrize(
    ("argv", "num_requests", "concurrency"),
    [
        (["monkeys"], 16, 0),
        (["monkeys", "--separate-samples"], 512, 0),
        (["sharegpt"], 200, 64),
        (["sharegpt", "--request-rate", "5"], 200, 0),
        (["sharegpt", "--request-rate", "5", "--concurrency", "8"], 200, 8),
    ],
)
def test_defaults_of_the_workloads(argv: list[str], num_requests: int, concurrency: int) -> None:
    args, requests = parse(argv)
    assert (len(requests), args.concurrency) == (num_requests, concurrency)
    assert all((request.arrival_s is not None) == ("--request-rate" in argv) for request in requests)
    assert all(request.ignore_eos for request in requests)
    if argv[0] == "monkeys":
        assert sum(request.num_samples * request.max_tokens for request in requests) == 16 * 32 * 128


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "WORKLOAD"),
        (["monkeys", "--samples", "0"], "--samples"),
        (["monkeys", "--questions", "201"], "200 questions"),
        (["monkeys", "--base-url", "127.0.0.1:80"], "--base-url"),
        (["monkeys", "--extra-body", "[]"], "--extra-body"),
        (["monkeys", "--output", "/nowhere/at/all.json"], "--output"),
        (["sharegpt", "--request-rate", "0"], "--request-rate"),
        (["sharegpt", "--mean-tokens", "2000"], "below the cap"),
        (["sharegpt", "--temperature", "nan"], "--temperature"),
        (["file", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_wrong_argument_is_named_with_exit_code_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(argv)
    assert raised.value.code == 2
    assert named in capsys.readouterr().err
