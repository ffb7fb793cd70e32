"""The measurements for a GPU, with a tiny model on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu import __main__ as gpu
from benchmarks.random_models import LLAMA_1B, LLAMA_8B, TINY, num_bytes, write_model
from benchmarks.server.own_server import child_pids, own_server
from tokasaurus.commands.bench.client import ServerError

PLAIN: list[str] = []
SMALL = ["max_seqs_per_forward=8", "max_tokens_per_forward=256"]
MEASURED = {
    "check": [("check", PLAIN)],
    "attention": [("attention", PLAIN), ("attention", ["attention_backend=torch"])],
    "profile": [("profile", PLAIN)],
    "steps": [(name, flags) for flags in (PLAIN, ["attention_backend=torch"]) for name in ("start", "steps")],
    "workloads": [
        *((name, PLAIN) for name in ("start", "groups", "sharegpt", "top_p")),
        *((name, ["use_hydragen=F"]) for name in ("start", "groups", "sharegpt")),
    ],
    "8b": [(name, PLAIN) for name in ("start", "steps", "monkeys", "sharegpt")],
}
"""By part of the program, what its dry run measures with which flags."""


@pytest.mark.long
@pytest.mark.parametrize("part", gpu.PART_NAMES)
def test_the_dry_run_of_a_part_works_alone(part: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert gpu.main([part, "--dry-run", "--output", str(path), *SMALL]) == 0
    results = json.loads(path.read_text())
    assert results["packages"]["torch"] == torch.__version__
    assert [(row["part"], row["flags"]) for row in results["parts"]] == MEASURED[part]
    for row in results["parts"]:
        assert row["status"] == "measured"
        CHECKS[row["part"]](row)
        assert (tmp_path / row.get("traces", ".")).is_dir()


def check_check(row: dict[str, Any]) -> None:
    assert {found["feature"] for found in row["check"]["results"]} >= {"attention_backend=cpu", "layers"}
    assert not row["check"]["switched_off"]


def check_attention(row: dict[str, Any]) -> None:
    values = row["attention"]
    assert values["backend"] == ("TorchBackend" if row["flags"] else "CpuBackend")
    for share, rate, of in (("decode", "decode_bytes", "copy_bytes"), ("prefix", "prefix_flop", "matmul_flop")):
        assert values[f"{share}_share"] == pytest.approx(values[f"{rate}_per_s"] / values[f"{of}_per_s"])
        assert values[f"{rate}_per_s"] > 0


def check_profile(row: dict[str, Any]) -> None:
    assert [measured["num_rows"] for measured in row["profile"]] == list(gpu.TINY_SIZES.profile_rows)
    for measured in row["profile"]:
        assert not measured["is_on_device"]
        assert measured["kernels_per_step"] > 1
        assert measured["busy_ms"] > 0
        assert 0 < measured["host_ms"] <= measured["step_ms"] * 1.5
        assert measured["with_prompt"]["host_ms"] > 0
        assert sum(kernel["share"] for kernel in measured["longest_kernels"]) <= 1.001


def check_start(row: dict[str, Any]) -> None:
    assert any("KV cache" in line for line in row["memory"])


def check_steps(row: dict[str, Any]) -> None:
    for measured, num_rows in zip(row["steps"], gpu.TINY_SIZES.num_rows, strict=True):
        assert measured["num_rows"] == num_rows
        assert 0 < measured["step_ms"] < measured["wall_ms"] * 1.01
        assert 0 <= measured["idle_share"] < 1


def check_monkeys(row: dict[str, Any]) -> None:
    sizes = gpu.TINY_SIZES
    num_tokens = sizes.questions * sizes.samples * sizes.max_tokens
    # one warm-up request of at most 8 tokens comes before
    assert num_tokens < row["metrics"]["toka_generation_tokens_total"] <= num_tokens + 8


def check_groups(row: dict[str, Any]) -> None:
    assert [measured["num_rows"] for measured in row["groups"]] == list(gpu.TINY_SIZES.group_rows)
    assert all(measured["summary"]["output_tokens_per_s"] > 0 for measured in row["groups"])


def check_sharegpt(row: dict[str, Any]) -> None:
    assert row["summary"]["num_requests"] == gpu.TINY_SIZES.requests


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "check": check_check,
    "attention": check_attention,
    "profile": check_profile,
    "start": check_start,
    "steps": check_steps,
    "monkeys": check_monkeys,
    "top_p": check_monkeys,
    "groups": check_groups,
    "sharegpt": check_sharegpt,
}


def test_a_dry_run_starts_no_server_twice() -> None:
    assert [run.flags for run in gpu.MODEL_PARTS["steps"]] == [(), ("torch_compile=T",), ("attention_backend=torch",)]
    assert [run.flags for run in gpu.tiny(gpu.MODEL_PARTS["steps"])] == [(), ("attention_backend=torch",)]
    assert [run.flags for run in gpu.MODEL_PARTS["profile"]] == [(), ("torch_compile=T",)]


def test_without_a_name_all_parts_run_each_with_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu, "_measure_part", lambda *call: calls.append(call))
    assert gpu.main(["--minutes", "2", "--output", str(tmp_path / "results.json"), "page_size=8"]) == 0
    assert [call[:3] for call in calls] == [(name, False, ["page_size=8"]) for name in MEASURED]
    assert all(0 < call[-1] - time.monotonic() <= 120 for call in calls)


def test_what_time_does_not_allow_is_not_run_and_said(tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "results.json", {"started_at": "now"})
    gpu.measure(
        gpu.tiny(gpu.MODEL_PARTS["8b"]),
        ["device=cpu"],
        gpu.TINY_SIZES,
        results,
        time.monotonic() + gpu.MIN_SECONDS - 1,
    )
    written = json.loads(results.path.read_text())
    assert written["started_at"] == "now"
    assert [(part["part"], part["status"], part["reason"]) for part in written["parts"]] == [
        (name, "not run", "no time is left") for name in ("steps", "monkeys", "sharegpt")
    ]


@pytest.mark.long
def test_sigterm_ends_the_server_and_keeps_what_is_measured(tmp_path: Path) -> None:
    """After a server that did not start, which is said and costs nothing else."""
    path, temporary = tmp_path / "results.json", tmp_path / "temporary"
    temporary.mkdir()
    program = f"""
import sys
from dataclasses import replace
from benchmarks.gpu import __main__ as gpu
gpu.TINY_SIZES = replace(gpu.TINY_SIZES, num_rows=(1, *[4] * 10_000))
gpu.MODEL_PARTS["8b"] = (gpu.ServerRun(gpu.TINY, ("steps",), ("page_size=nothing",)), *gpu.MODEL_PARTS["8b"])
sys.exit(gpu.main(["8b", "--dry-run", "--output", {str(path)!r}, *{SMALL}]))
"""
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while '"part": "start"' not in path.read_text() if path.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = child_pids(process.pid)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == gpu.INTERRUPTED
    not_started, *parts = json.loads(path.read_text())["parts"]
    assert (not_started["part"], not_started["status"]) == ("steps", "not run")
    assert "page_size" in not_started["reason"]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("start", "measured"),
        ("steps", "failed"),
        ("monkeys", "not run"),
        ("sharegpt", "not run"),
    ]
    assert {part["reason"] for part in parts[1:]} == {"interrupted"}
    assert parts[1]["steps"][0]["num_rows"] == 1, "what was measured before the signal is kept"
    assert "1 rows:" in output
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs in Python that run in turn in place of the benchmark's processes."""
    programs: list[str] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, command: list[str], **options: Any) -> None:
            if command[2] == "tokasaurus":
                directory = Path(command[4].removeprefix("model="))
                assert json.loads((directory / "config.json").read_text())["vocab_size"] > 1000
            super().__init__([sys.executable, "-c", programs.pop(0)], **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return programs


def test_the_reason_of_a_failed_process_is_its_last_line(tmp_path: Path, programs: list[str]) -> None:
    row = json.dumps({"backend": "x"})
    fails = f"import sys; print({row!r}, flush=True); sys.exit('Traceback\\nRuntimeError: no kernel\\n\\n')"
    programs += [fails] * 2
    results = gpu.Results(tmp_path / "results.json", {})
    gpu.measure_attention(["--device=cuda"], results, time.monotonic() + 60)
    assert [(part["status"], part["reason"]) for part in results.parts] == [("failed", "RuntimeError: no kernel")] * 2
    assert [part["attention"] for part in results.parts] == [{"backend": "x"}] * 2
    assert results.log_path.read_text().count("RuntimeError: no kernel") == 2
    assert gpu._last_line("", 3) == "exit code 3"


def test_what_a_check_finds_wrong_is_the_reason(tmp_path: Path, programs: list[str]) -> None:
    """And what keeps it from running at all."""
    right, wrong = (
        {"feature": feature, "name": None, "failure": why, "seconds": 1.0}
        for feature, why in (("a", None), ("b", "raises X"))
    )
    lines = "".join(f"{json.dumps(row)}\n" for row in ({"device": "x"}, right, wrong))

    def program(output: str, log: str, end: str) -> str:
        return (
            f"import sys, time\nsys.stdout.write({output!r})\nsys.stdout.flush()\nsys.stderr.write({log!r})\n"
            f"sys.stderr.flush()\n{end}"
        )

    programs += [
        program(lines + '{"switched_off": []}\n', "log", "sys.exit(1)"),
        program("", "more\ntoka check: no such flag\n", "sys.exit(2)"),
        program(lines + '{"feature": "cut', "", "time.sleep(60)"),
        program("", "", "time.sleep(60)"),
    ]
    results = gpu.Results(tmp_path / "results.json", {})
    gpu.measure_checks(gpu.CHECK_RUNS, ["device=cuda"], results, time.monotonic() + 60)
    for run in gpu.CHECK_RUNS:
        gpu.measure_checks([run], ["device=cuda"], results, time.monotonic() + 2.2)
    late = "it was not finished after 2 s"
    reasons = ["b: raises X", "toka check: no such flag", f"b: raises X; {late}", late]
    assert [part["reason"] for part in results.parts] == reasons
    for index in (0, 2):
        assert "1 of 2 comparisons are right, 2.0 s" in gpu._shown(results.parts[index])
    assert results.log_path.read_text() == "logmore\ntoka check: no such flag\n"


def test_rows_are_kept_of_a_process_that_is_too_late_or_fails(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    program = "import sys, time\nprint('{\"num_rows\": 1}', flush=True)\n"
    log = tmp_path / "log"

    def run(end: str, timeout_s: float) -> None:
        rows.extend(gpu._rows_of([sys.executable, "-c", program + end], timeout_s, log))

    with pytest.raises(gpu.TooLate, match="not finished after 1 s"):
        run("time.sleep(60)", 1.0)
    with pytest.raises(ServerError, match="ValueError: no such kernel"):
        run("raise ValueError('no such kernel')", 30.0)
    assert rows == [{"num_rows": 1}] * 2


def test_a_row_is_in_the_file_before_the_next_one_is_measured(tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "results.json", {})
    with results.measuring(gpu.CHECK_RUNS[0], "steps") as measured:
        for num_rows in (1, 4):
            measured.add_row("steps", {"num_rows": num_rows})
            [part] = json.loads(results.path.read_text())["parts"]
            assert part["status"] == "running"
            assert part["steps"][-1] == {"num_rows": num_rows}
    assert [part["status"] for part in json.loads(results.path.read_text())["parts"]] == ["measured"]


def test_a_kill_leaves_what_a_part_has_found(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "check", "--dry-run", "--output", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or '"failure"' not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    [part] = json.loads(path.read_text())["parts"]
    assert part["status"] == "running"
    assert part["check"]["results"][0]["feature"] == "attention_backend=cpu"
    assert "weights" in path.with_suffix(".log").read_text(), "the phases of the start"


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["step"])
    assert "check, attention, profile, steps, workloads, 8b" in capsys.readouterr().err


def test_a_server_that_starts_too_slowly_is_ended(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    with pytest.raises(ServerError, match="did not start"), own_server([f"model={tmp_path}", "device=cpu"], 0.01):
        pass


def test_the_checkpoint_is_one_that_transformers_reads(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    first, last = model.model.layers
    assert torch.equal(first.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert 0.01 < float(first.mlp.up_proj.weight.detach().float().std()) < 0.03
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("Grüße 1234")["input_ids"]) == "Grüße 1234"
    assert len(tokenizer("Grüße")["input_ids"]) == len("Grüße".encode())


def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    total = 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (not a mapping)
    assert 0 <= total - num_bytes(TINY) <= 2 * TINY.hidden_size * (2 * TINY.num_layers + 1)  # the norms
    assert round(num_bytes(LLAMA_1B) / 2e9, 2) == 1.24  # parameters of Llama 3.2 1B, in billions
    assert round(num_bytes(LLAMA_8B) / 2e9, 2) == 8.03
