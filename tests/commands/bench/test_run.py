"""`toka bench` as it is called, against a scripted server."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.helpers.toka_process import wait_for
from tokasaurus.cli import bench_main
from tokasaurus.command_line import read
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.measure import requests_of, values_of
from tokasaurus.commands.bench.run import api_url, round_orders
from tokasaurus.flags import FlagError

SHORT = ("questions=2", "samples=2", "max_tokens=3", "warmup=0")


def run(scripted_server: Any, *words: str) -> int:
    return bench_main([words[0], f"base_url={scripted_server.base_url}/", *words[1:]])


def test_monkeys_run_writes_totals_that_the_server_confirms(
    scripted_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "monkeys.json"
    words = ["questions=4", "samples=3", "max_tokens=5", "warmup=2", "api_key=secret"]
    assert run(scripted_server, "monkeys", *words, f"output={output}") == 0
    [report] = json.loads(output.read_text())["runs"]
    timed = scripted_server.bodies[2:]  # after the warm-up
    assert [(body["n"], body["max_tokens"], body["ignore_eos"]) for body in timed] == [(3, 5, True)] * 4
    assert not any("stream" in body for body in timed)
    summary = report["summary"]
    assert (summary["num_requests"], summary["num_failed"]) == (4, 0)
    assert summary["completion_tokens"] == 4 * 3 * 5
    assert summary["prompt_tokens"] == sum(len(body["prompt"].split()) for body in timed)
    assert summary["output_tokens_per_s"] == pytest.approx(60 / summary["wall_s"])
    assert [request["completion_tokens"] for request in report["requests"]] == [15] * 4
    assert report["server"]["model"] == "scripted"
    assert report["server"]["version"] == {"version": "1.2.3"}
    assert (report["name"], report["seed"], report["config"]["questions"]) == ("server", 0, 4)
    assert "secret" not in output.read_text()
    shown = capsys.readouterr().out
    assert "output tokens/s" in shown
    assert "end to end" in shown
    assert "TTFT" not in shown


def test_a_stream_has_the_times_of_tokens(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["requests=3", "mean_tokens=4", "cap=8", 'goodput={"ttft": 60000}', "price_per_hour=2"]
    assert run(scripted_server, "sharegpt", *words) == 0
    assert all(body["stream"] for body in scripted_server.bodies)
    shown = capsys.readouterr().out
    for name in ("TTFT", "TPOT", "ITL", "end to end", "good requests/s", "cost of 1M output tokens"):
        assert name in shown


def test_the_servers_metrics_are_read_along(scripted_server: Any, tmp_path: Path) -> None:
    scripted_server.metrics = 'toka_kv_blocks_used{replica="0"} 30\ntoka_kv_blocks{replica="0"} 40\n'
    output = tmp_path / "run.json"
    assert run(scripted_server, "monkeys", *SHORT, f"output={output}") == 0
    [report] = json.loads(output.read_text())["runs"]
    assert report["server_figures"]["kv_peak"] == 0.75


def test_failures_are_shown_and_make_the_exit_code_1(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_server.status = lambda body: 500 if body["max_tokens"] > 100 else 200
    words = ["requests=10", "mean_tokens=20", "cap=50", "ignore_eos=F", "stream=F"]
    assert run(scripted_server, "sharegpt", *words) == 0
    assert run(scripted_server, "sharegpt", "requests=10", "stream=F") == 1
    assert "HTTP 500" in capsys.readouterr().err


def test_wrong_token_count_is_a_failure(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def count_one_choice(body: dict[str, Any]) -> dict[str, Any]:
        answer = scripted_server.honest_answer(body)
        answer["usage"]["completion_tokens"] = body["max_tokens"]
        return answer

    scripted_server.answer = count_one_choice
    words = ["monkeys", "questions=2", "samples=4"]
    assert run(scripted_server, *words) == 1
    assert "usage_per_choice=" in capsys.readouterr().err
    assert run(scripted_server, *words, "usage_per_choice=all") == 0
    assert run(scripted_server, *words, "separate_samples=T") == 0


def test_file_load_and_chat_reach_their_routes(scripted_server: Any, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text(
        '{"prompt": "a", "max_tokens": 3, "arrival_s": 0}\n'
        '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3, "arrival_s": 0.05}\n'
    )
    assert run(scripted_server, "file", f"input={load}", "warmup=0") == 0
    assert scripted_server.paths == ["completions", "chat/completions"]
    assert run(scripted_server, "sharegpt", "requests=2", "mean_tokens=3", "cap=5", "chat=T") == 0
    assert set(scripted_server.paths[2:]) == {"chat/completions"}


def test_every_workload_is_answered(scripted_server: Any) -> None:
    chats = ["groups=2", "chats=2", "turns=2", "system_tokens=20", "max_tokens=3"]
    assert run(scripted_server, "prefix-chat", *chats, "warmup=0") == 0
    assert [len(body["messages"]) for body in scripted_server.bodies] == [2] * 4 + [4] * 4
    scripted_server.bodies.clear()
    assert run(scripted_server, "multiple-choice", "contexts=2", "context_tokens=20", "warmup=0") == 0
    assert [(body["echo"], body["logprobs"], body["max_tokens"]) for body in scripted_server.bodies] == [
        (True, 1, 1)
    ] * 8


def test_absent_server_is_one_error_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["monkeys", "base_url=http://127.0.0.1:1/v1"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_failed_warm_up_ends_the_run(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_server.status = lambda _: 500
    assert run(scripted_server, "monkeys") == 1
    assert "warm-up" in capsys.readouterr().err
    assert len(scripted_server.bodies) == 1


def test_every_other_round_runs_backwards() -> None:
    assert round_orders(["a", "b", "c"], 3) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_servers_get_the_same_load_in_a_round_and_another_in_the_next(
    scripted_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs.json"
    url = scripted_server.base_url
    assert (
        bench_main(["monkeys", f"peer=first={url},second={url}", "rounds=2", "seed=7", *SHORT, f"output={output}"]) == 0
    )
    runs = json.loads(output.read_text())["runs"]
    order = [("first", 7), ("second", 7), ("second", 8), ("first", 8)]
    assert [(run["name"], run["seed"]) for run in runs] == order
    rounds = [scripted_server.bodies[start : start + 2] for start in range(0, 8, 2)]
    prompts = [{body["prompt"] for body in bodies} for bodies in rounds]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert not prompts[0] & prompts[2]
    captured = capsys.readouterr()
    assert "over first" in captured.out
    assert captured.err.count("output tokens/s") == 4


def test_a_server_that_cannot_be_measured_leaves_what_was_measured(scripted_server: Any, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    servers = f"peer=good={scripted_server.base_url},bad=http://127.0.0.1:1/v1"
    assert bench_main(["monkeys", servers, "rounds=1", *SHORT, f"output={output}"]) == 1
    assert [run["name"] for run in json.loads(output.read_text())["runs"]] == ["good"]


@pytest.mark.parametrize(
    ("words", "num_requests", "concurrency", "is_streaming"),
    [
        ([], 16, None, False),
        (["separate_samples=T"], 512, None, False),
        (["workload=sharegpt"], 200, 64, True),
        (["workload=sharegpt", "request_rate=5"], 200, None, True),
        (["workload=sharegpt", "request_rate=5", "concurrency=8", "stream=F"], 200, 8, False),
        (["workload=multiple-choice", "concurrency=0"], 400, None, False),
        (["workload=prefix-chat"], 192, None, True),
    ],
)
def test_defaults_of_the_workloads(
    words: list[str], num_requests: int, concurrency: int | None, is_streaming: bool
) -> None:
    config = BenchConfig.parse(words)
    requests = requests_of(config, config.seed)
    assert (len(requests), config.num_in_flight, config.is_streaming) == (num_requests, concurrency, is_streaming)
    assert all((request.arrival_s is not None) == ("request_rate=5" in words) for request in requests)
    if config.workload == "monkeys":
        assert all(request.ignore_eos for request in requests)
        assert sum(request.num_samples * request.max_tokens for request in requests) == 16 * 32 * 128


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing"], "workload"),
        (["samples=0"], "samples=0"),
        (["questions=201"], "200 questions"),
        (["base_url=127.0.0.1:80"], "base_url=127.0.0.1:80"),
        (["extra_body=[]"], "extra_body"),
        (["output=/nowhere/at/all.json"], "output=/nowhere"),
        (["sharegpt", "request_rate=0"], "request_rate=0"),
        (["sharegpt", "mean_tokens=2000"], "below the cap"),
        (["sharegpt", "questions=3"], "questions: only of monkeys"),
        (["temperature=nan"], "temperature=nan"),
        (["file"], "input="),
        (["file", "input=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["peer=tgi"], "peer=tgi: there are toka, vllm"),
        (["peer=toka", 'peer_args={"vllm": "-x"}'], "vllm is not started"),
        (["peer=toka,vllm"], "peer=vllm: needs model="),
        (["peer=a=http://x,a=http://y"], "each name once"),
        (['goodput={"speed": 3}'], "there are ttft, tpot, e2el"),
        (['goodput={"ttft": 3}'], "need stream=T"),
        (["prefix-chat", "request_rate=3"], "request_rate"),
    ],
)
def test_wrong_flags_are_named_with_exit_code_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_main(words) == 2
    assert named in capsys.readouterr().err


def test_a_run_with_failures_is_not_compared(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = scripted_server.base_url
    scripted_server.status = lambda _: 500 if len(scripted_server.bodies) > 2 else 200
    assert bench_main(["monkeys", f"peer=good={url},bad={url}", "rounds=1", *SHORT]) == 1
    captured = capsys.readouterr()
    assert "1 runs with failed requests are left out" in captured.err
    assert "good, 1 runs" in captured.out
    assert "bad" not in captured.out


def test_programs_of_all_servers_are_found_before_one_is_measured(
    scripted_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = f"peer=there={scripted_server.base_url},sglang"
    assert bench_main(["monkeys", servers, "model=m", 'peer_env={"sglang": "/nowhere"}', *SHORT]) == 1
    assert "/nowhere is neither a program nor an environment" in capsys.readouterr().err
    assert scripted_server.bodies == []


@pytest.mark.parametrize(("peers", "expected"), [([], None), (["peer=toka"], "org/served")])
def test_the_model_to_serve_may_be_a_variable_where_one_is_served(peers: list[str], expected: str | None) -> None:
    given = read(BenchConfig, peers, {"TOKA_MODEL": "org/served"})
    assert given.config.model == expected
    assert read(BenchConfig, [*peers, "model=typed"], {"TOKA_MODEL": "org/served"}).config.model == "typed"


def test_a_signal_stops_the_server_that_was_started_and_keeps_the_results(scripted_server: Any, tmp_path: Path) -> None:
    output, pid_file, program = tmp_path / "runs.json", tmp_path / "pid", tmp_path / "never_ready"
    program.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 600\n")
    program.chmod(0o755)
    words = [
        f"peer=good={scripted_server.base_url},sglang",
        "model=m",
        f'peer_env={{"sglang": "{program}"}}',
        "rounds=1",
    ]
    command = [sys.executable, "-m", "tokasaurus", "bench", "monkeys", *words, *SHORT, f"output={output}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(pid_file.exists, 60)
    wait_for(lambda: bool(pid_file.read_text()), 10)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "toka bench: stopped"
    assert "Traceback" not in err
    assert [run["name"] for run in json.loads(output.read_text())["runs"]] == ["good"]
    wait_for(lambda: not Path(f"/proc/{int(pid_file.read_text())}").exists(), 10)


def test_secrets_are_not_written(scripted_server: Any, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    url = scripted_server.base_url.replace("://", "://user:hidden1@")
    given = BenchConfig.parse(
        [f"base_url={url}", "peer=vllm", "model=m", 'peer_args={"vllm": "--api-key hidden2 -x 1"}']
    )
    shown = json.dumps(values_of(given))
    assert "hidden" not in shown
    assert "--api-key ***" in shown.replace("'", "")
    assert "-x 1" in shown
    assert bench_main([f"base_url={url}", *SHORT, "api_key=hidden3", f"output={output}"]) == 0
    assert "hidden" not in output.read_text()


def test_a_full_disk_is_one_line_and_leaves_the_old_file(
    scripted_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs.json"
    output.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fail)
    assert run(scripted_server, "monkeys", *SHORT, f"output={output}") == 1
    assert f"{output}: No space left on device" in capsys.readouterr().err.replace("\n", "")
    assert output.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://[::1]:80/v3", "http://[::1]:80/v3"),
    ],
)
def test_a_url_without_a_path_gets_that_of_the_api(typed: str, meant: str) -> None:
    assert api_url(typed) == meant


def test_a_server_is_reached_by_its_port_or_its_socket(
    scripted_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    port = scripted_server.base_url.rpartition(":")[2].removesuffix("/v1")
    assert bench_main([f"port={port}", *SHORT]) == 0
    assert bench_main(["unix_socket=/nowhere/socket", *SHORT]) == 1
    assert "/nowhere/socket" in capsys.readouterr().err


def test_proxies_of_the_environment_are_for_other_machines(
    scripted_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert run(scripted_server, "monkeys", *SHORT) == 0
    assert bench_main(["base_url=http://192.0.2.1/v1", *SHORT]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err.replace("', ", ":").replace("'", "")


def test_a_rate_and_arrivals_of_a_file_exclude_each_other(tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt": "a", "max_tokens": 3, "arrival_s": 0}\n')
    config = BenchConfig.parse(["workload=file", f"input={load}", "request_rate=2"])
    with pytest.raises(FlagError, match="arrival_s"):
        requests_of(config, 0)


def test_the_programs_that_measure_load_no_torch() -> None:
    code = "import tokasaurus.commands.bench.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
